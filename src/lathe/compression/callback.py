"""The base class of compression callbacks, and the samples that they read outside the training loop."""

from itertools import islice
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

from lathe.data.base import ExactDataModule
from lathe.data.order import EpochLoader
from lathe.data.transfer import train_batches, val_batches
from lathe.errors import UserError
from lathe.measure.flops import net_input


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
        """Return the optimizer steps of the whole run; raise UserError if the run has no end."""
        steps = trainer.estimated_stepping_batches
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


def compressions(trainer: Trainer) -> list[Compression]:
    """Return the compression methods of a run."""
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return [callback for callback in callbacks if isinstance(callback, Compression)]


def source_of(trainer: Trainer, pl_module: LightningModule) -> Any:
    """Return what has the run's loaders: the data module, or the LightningModule."""
    return getattr(trainer, "datamodule", None) or pl_module


def an_input(trainer: Trainer, pl_module: LightningModule, samples: int) -> Tensor:
    """Return the net's input for `samples` validation samples, on the trainer's device."""
    return net_input(next(iter(val_batches(source_of(trainer, pl_module)))))[:samples]


def inputs_of(datamodule: Any, batches: int) -> list[Tensor]:
    """Return the inputs of the first `batches` training batches."""
    return [net_input(batch) for batch in islice(train_batches(datamodule), batches)]


def first_batches(trainer: Trainer, pl_module: LightningModule, count: int) -> list[Any]:
    """Return training batches of epoch 0 on the trainer's device, and reset the train loader to its first batch."""
    source = source_of(trainer, pl_module)
    batches = list(islice(train_batches(source), count))
    if isinstance(source, ExactDataModule):
        source.setup("fit")
    elif source is not pl_module and isinstance(loader := source.train_dataloader(), EpochLoader):
        loader.load_state_dict({"epoch": 0, "batch": 0})
    return batches
