"""The base class of compression callbacks, and the samples that they read outside the training loop."""

from itertools import islice
from typing import Any

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn

from lathe.data.base import ExactDataModule
from lathe.data.order import EpochLoader
from lathe.data.transfer import train_batches, val_batches
from lathe.errors import UserError
from lathe.measure.flops import net_input
from lathe.tasks.core import is_foreign, record_calls


class Compression(Callback):
    """A compression method, listed under `compression` in the configuration.

    `window` is its share of the run's optimizer steps, set by `compression.stages` before training; the method's own
    start and end are shares of that window. Its changes of the net remain afterwards.
    """

    window: tuple[float, float] = (0.0, 1.0)
    removes_late = False  # True if parts of parameters are removed after training; `leaving` returns them once chosen

    def step_at(self, trainer: Trainer, share: float) -> int:
        """Return the optimizer step at `share` of the window; 0 is before the run's first step."""
        start, end = self.window
        return round((start + share * (end - start)) * self.total_steps(trainer))

    def total_steps(self, trainer: Trainer) -> int:
        """Return the steps of the whole run as `steps_of` counts them; raise UserError if the run has no end."""
        steps = trainer.estimated_stepping_batches
        if steps < 0:  # Lightning returns max_steps
            raise UserError(
                "trainer.max_steps=-1: the training data have no length, and compression needs an end. Set "
                "trainer.limit_train_batches=<batches> or trainer.max_steps."
            )
        if steps == float("inf"):
            raise UserError(
                "trainer.max_epochs=-1 and trainer.max_steps=-1: compression needs an end. Set one of them."
            )
        return int(steps)

    def check(self, net: nn.Module) -> None:
        """Raise UserError if the method can't be applied to `net`; called before data are loaded."""

    def ready(self, trainer: Trainer) -> bool:
        """Return whether the net has its final structure; best.ckpt is only judged then."""
        return True

    def finalise(self, net: nn.Module, datamodule: Any) -> bool:
        """Change the best weights after training, on the CPU of one process; return whether the net changed.

        The data module is set up and has no trainer. A changed net is validated and written to best.ckpt again.
        """
        return False

    def leaving(self) -> dict[str, dict[int, set[int]]]:
        """Return the positions that are removed after training, by parameter name and dimension."""
        return {}

    def report(self) -> dict[str, float]:
        """Return metrics for result.json, such as {"prune/sparsity": 0.8}."""
        return {}


def steps_of(trainer: Trainer) -> int:
    """Return the optimizer steps so far; with manual optimization the batches, which may have several steps each."""
    if trainer.lightning_module.automatic_optimization:
        return trainer.global_step
    progress: Any = trainer.fit_loop.epoch_loop.batch_progress.total
    return int(progress.processed)


def compressions(trainer: Trainer) -> list[Compression]:
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return [callback for callback in callbacks if isinstance(callback, Compression)]


def source_of(trainer: Trainer, pl_module: LightningModule) -> Any:
    """Return what has the run's loaders: the data module, or the LightningModule."""
    return getattr(trainer, "datamodule", None) or pl_module


def an_input(trainer: Trainer, pl_module: LightningModule, samples: int, device: torch.device | None = None) -> Any:
    """Return the core's input for `samples` validation samples, a tensor or a Call, on the trainer's device by default.

    Training samples stand in where a LightningModule is not validated.
    """
    device, source = device or trainer.strategy.root_device, source_of(trainer, pl_module)
    if not is_foreign(pl_module):
        return net_input(next(iter(val_batches(source, device))))[:samples]
    home = next(pl_module.parameters()).device  # the whole module is moved after `setup`
    is_validated = is_overridden("val_dataloader", source, LightningDataModule)
    batches = val_batches(source, home) if is_validated else first_batches(trainer, pl_module, 1, home)
    return record_calls(pl_module, batches)[0].to(device)[:samples].example


def inputs_of(datamodule: Any, batches: int) -> list[Any]:
    """Return the core's inputs for the first `batches` training batches; the data are those of `reads_for`, a task."""
    task = getattr(datamodule, "reads_for", None)
    loaded = train_batches(datamodule)
    if task is None:
        return [net_input(batch) for batch in islice(loaded, batches)]
    return [call.example for call in record_calls(task, loaded, batches, split="train")]


def first_batches(
    trainer: Trainer, pl_module: LightningModule, count: int, device: torch.device | None = None
) -> list[Any]:
    """Return training batches of epoch 0 on the trainer's device, and reset the train loader to its first batch."""
    source = source_of(trainer, pl_module)
    batches = list(islice(train_batches(source, device), count))
    if isinstance(source, ExactDataModule):
        source.setup("fit")
    elif source is not pl_module and isinstance(loader := source.train_dataloader(), EpochLoader):
        loader.load_state_dict({"epoch": 0, "batch": 0})
    return batches
