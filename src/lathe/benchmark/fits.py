"""A fit as in a training run, with callbacks that time its steps."""

import statistics
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import Callback
from torch.nn.parallel import DistributedDataParallel

from lathe.callbacks import skip_empty_hooks
from lathe.measure import count_parameters
from lathe.runs.build import make_data, make_task
from lathe.training.callbacks_and_loggers import make_methods
from lathe.training.trainer_setup import make_trainer, prepare_model


def fit(cfg: dict[str, Any], callbacks: list[Callback]) -> tuple[Trainer, int]:
    """Train with this configuration; return the Trainer and the number of parameters."""
    seed_everything(cfg["seed"], workers=True, verbose=False)
    datamodule, task = make_data(cfg), make_task(cfg)
    parameters = count_parameters(task.net).total
    callbacks = [*make_methods(cfg), *callbacks]
    skip_empty_hooks(callbacks)
    trainer = make_trainer(cfg, Path(cfg["paths"]["run_dir"]), callbacks)
    prepare_model(cfg, task, trainer)
    trainer.fit(task.driven, datamodule=datamodule)
    return trainer, parameters


class Clock(Callback):
    """Takes the times at which steps end, synchronised with a GPU before the first and after the last."""

    skippable_steps = None  # needs every step

    def __init__(self, warmup: int, steps: int, sync: bool) -> None:
        self.warmup, self.steps, self.sync = warmup, steps, sync
        self.ends: list[float] = []
        self.cpu: list[float] = []  # of this process: other load on the machine does not affect it

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self.sync:
            assert isinstance(trainer.strategy.model, DistributedDataParallel)
            trainer.strategy.model.require_backward_grad_sync = False  # as no_sync() does

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        cuda = trainer.strategy.root_device.type == "cuda"
        if trainer.global_step > self.warmup:
            first, last = not self.ends, len(self.ends) == self.steps
            if cuda and (first or last):
                torch.cuda.synchronize()
                if first:
                    torch.cuda.reset_peak_memory_stats()
            self.ends.append(time.perf_counter())
            self.cpu.append(time.process_time())

    def step_ms(self, cuda: bool) -> float:
        """Return the median on a CPU, without the break between epochs; the mean on a GPU, whose steps overlap."""
        if cuda:
            return (self.ends[-1] - self.ends[0]) / (len(self.ends) - 1) * 1e3
        return statistics.median(after - before for before, after in zip(self.ends, self.ends[1:], strict=False)) * 1e3

    def fastest_ms(self) -> float:
        """Return the shortest step, which other load disturbed least; meaningless on a GPU, whose steps overlap."""
        return min(after - before for before, after in zip(self.ends, self.ends[1:], strict=False)) * 1e3
