"""Base class of compression methods."""

from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback
from torch import nn

from lathe.errors import UserError


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
                "trainer.max_epochs=-1 and trainer.max_steps=-1 have no end for compression to plan for: set one of "
                "them."
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
