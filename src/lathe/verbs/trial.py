"""The run of a few optimizer steps that lr_find.py, batch_find.py and profile.py try out: the run's own data, task,
strategy, precision and clipping; nothing of it is kept.
"""

import warnings
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningDataModule, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.optim import Optimizer

from lathe.callbacks import FrozenStatistics
from lathe.errors import require
from lathe.runs.build import make_data, make_task
from lathe.runs.pretrained import take_pretrained
from lathe.runs.trainer import make_trainer, prepare, quiet, widen
from lathe.tasks import Task
from lathe.verbs.train import check_loaders, start_from, tell_lightnings

# What a test of a few steps leaves out of a run.
WITHOUT = {
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
IDLE = 100  # batches for each optimizer step that is to come, after which a module that makes none is told


class Trial:
    """`data`, `task` and `trainer` of a run that `fit` takes through `find.steps` optimizer steps.

    Schedulers, callbacks, validation and loggers are left out, those of a user's own module among them.

    Raises:
        UserError: a part can't be built.
    """

    def __init__(self, cfg: dict[str, Any]) -> None:
        quiet()
        warnings.filterwarnings("ignore", message="The number of training batches .* is smaller than the logging")
        seed_everything(cfg["seed"], workers=True, verbose=False)
        trainer_keys = {**cfg["trainer"], **WITHOUT, "max_steps": cfg["find"]["steps"]}
        self.cfg = {**cfg, "scheduler": None, "trainer": trainer_keys}
        self.data: LightningDataModule = make_data(self.cfg)
        self.task: Task = make_task(self.cfg)

    def fit(self, *watching: Callback) -> Trainer:
        """Trains, with these callbacks; returns the Trainer.

        Raises:
            UserError: the run can't work, its data give no batch, or its module makes no optimizer step.
        """
        cfg, task = self.cfg, self.task
        task.check_run(cfg)
        check_loaders(cfg, self.data)
        widen(task, cfg)
        frozen = [FrozenStatistics()] if cfg.get("freeze") else []
        bounds = Bounds(cfg["find"]["steps"])
        callbacks = [bounds, *task.own_callbacks(), *frozen, *watching]
        trainer = make_trainer(cfg, Path(cfg["find"]["output"]).parent, callbacks, [DummyLogger()])
        _begin_with(cfg, task)
        prepare(cfg, task, trainer)
        _leave_out_callbacks(task.driven)
        try:
            trainer.fit(task.driven, datamodule=self.data)
        except (RuntimeError, TypeError, ValueError, AttributeError, MisconfigurationException) as error:
            tell_lightnings(error, bounds.batches > 0, trainer)
            raise
        bounds.check_batches()
        return trainer


def rates_of(optimizer: Optimizer) -> list[float]:
    """The rate of each parameter group that has one: what its scheduler, if there is one, starts from or rises to."""
    groups = [group for group in optimizer.param_groups if "lr" in group]
    return [float(group.get("max_lr", group.get("initial_lr", group["lr"]))) for group in groups]


def _begin_with(cfg: dict[str, Any], task: Task) -> None:
    """Gives the net the weights that the run would begin with."""
    if cfg["ckpt_path"] is not None:
        start_from(cfg, task)
    elif cfg["model"].get("pretrained"):
        take_pretrained(task.net, cfg["model"])


def _leave_out_callbacks(module: LightningModule) -> None:
    """Has Lightning call the module's configure_callbacks, for what else it does, and attach none of them: they would
    write checkpoints, or end the few steps early."""
    configure = module.configure_callbacks

    def none() -> list[Callback]:
        configure()
        return []

    module.configure_callbacks = none  # type: ignore[method-assign]


class Bounds(Callback):
    """Sees to it that a trial ends, and that only the callback that reads it sets what it reads: schedulers of the
    user's own are taken away.

    Raises:
        UserError: an epoch without a batch, or batches without an optimizer step.
    """

    skippable_steps = None  # every step is needed

    def __init__(self, steps: int) -> None:
        self.steps, self.batches = steps, 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer.strategy.lr_scheduler_configs = []

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.batches += 1
        require(
            trainer.global_step > 0 or self.batches < IDLE * trainer.accumulate_grad_batches,
            f"model.net: {type(pl_module).__name__} has made no optimizer step in {self.batches} batches: call its "
            "optimizer's step in training_step.",
        )
        if self.batches >= IDLE * trainer.accumulate_grad_batches * self.steps:
            trainer.should_stop = True  # steps that are far apart

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.check_batches()

    def check_batches(self) -> None:
        """Raises UserError where no batch came."""
        require(
            self.batches > 0,
            "data: there is no training batch: look whether its source is empty, drop_last leaves out all there is, or "
            "trainer.limit_train_batches is 0.",
        )
