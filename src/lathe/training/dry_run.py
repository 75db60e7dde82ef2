"""A run of a few optimizer steps that keeps nothing, for lr_find.py, batch_find.py and profile.py."""

import warnings
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningDataModule, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers.logger import DummyLogger
from torch.optim import Optimizer

from lathe.callbacks import FrozenStatistics
from lathe.errors import require
from lathe.runs.build import make_data, make_task
from lathe.tasks import Task
from lathe.training.run_start import check_loaders, explain_lightning_errors
from lathe.training.trainer_setup import configure_logging, make_trainer, prepare_model, to_double
from lathe.training.weight_loading import initialise

# of the Trainer
OFF = {
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "limit_val_batches": 0,
    "num_sanity_val_steps": 0,
    "max_epochs": -1,
    "min_epochs": None,
    "min_steps": None,
    "max_time": None,
    "fast_dev_run": False,
}
MOST_BATCHES = 100  # of an optimizer step; a module that needs more is refused


class DryRun:
    """The `data`, `task` and Trainer of a run, which `fit` takes through `find.steps` optimizer steps.

    Data, strategy, precision and clipping are those of the run. Schedulers, callbacks, validation and loggers are left
    out, also those of a user's module.
    """

    def __init__(self, cfg: dict[str, Any]) -> None:
        configure_logging()
        warnings.filterwarnings("ignore", message="The number of training batches .* is smaller than the logging")
        seed_everything(cfg["seed"], workers=True, verbose=False)
        trainer_keys = {**cfg["trainer"], **OFF, "max_steps": cfg["find"]["steps"]}
        self.cfg = {**cfg, "scheduler": None, "trainer": trainer_keys}
        self.data: LightningDataModule = make_data(self.cfg)
        self.task: Task = make_task(self.cfg)

    def fit(self, *callbacks: Callback) -> Trainer:
        """Train with these callbacks, and return the Trainer."""
        cfg, task = self.cfg, self.task
        task.check_run(cfg)
        check_loaders(cfg, self.data, task.driven)
        to_double(task, cfg)
        frozen = [FrozenStatistics()] if cfg.get("freeze") else []
        bounds = StepBounds(cfg["find"]["steps"])
        directory = Path(cfg["find"]["output"]).parent
        trainer = make_trainer(
            cfg, directory, [bounds, *task.own_callbacks(), *frozen, *callbacks], loggers=[DummyLogger()]
        )
        initialise(cfg, task)
        prepare_model(cfg, task, trainer)
        configure, module = task.driven.configure_callbacks, task.driven

        def without_callbacks() -> list[Callback]:
            configure()  # what it returns would write checkpoints or stop
            return []

        module.configure_callbacks = without_callbacks  # type: ignore[method-assign]
        with explain_lightning_errors(trainer, lambda: bounds.batches > 0):
            trainer.fit(task.driven, datamodule=self.data)
        bounds.check_batches()
        return trainer


def learning_rates(optimizer: Optimizer) -> list[float]:
    """Return the learning rate of each parameter group that has one, from which a scheduler starts or to which it
    rises.
    """
    groups = [group for group in optimizer.param_groups if "lr" in group]
    return [float(group.get("max_lr", group.get("initial_lr", group["lr"]))) for group in groups]


class StepBounds(Callback):
    """End the dry run, and remove a user's schedulers, so that only the command's callback sets learning rates."""

    skippable_steps = None  # needs every step

    def __init__(self, steps: int) -> None:
        self.steps, self.batches = steps, 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer.strategy.lr_scheduler_configs = []

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.batches += 1
        most = MOST_BATCHES * trainer.accumulate_grad_batches
        require(
            trainer.global_step > 0 or self.batches < most,
            f"model.net: {type(pl_module).__name__} has made no optimizer step in {self.batches} batches: call its "
            "optimizer's step in training_step.",
        )
        if self.batches >= most * self.steps:
            trainer.should_stop = True

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.check_batches()

    def check_batches(self) -> None:
        """Raise UserError if the data gave no batch."""
        require(
            self.batches > 0,
            "data: there is no training batch: look whether its source is empty, drop_last leaves out all there is, or "
            "trainer.limit_train_batches is 0.",
        )
