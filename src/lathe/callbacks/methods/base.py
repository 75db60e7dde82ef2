"""What every method of compression is to a run: a callback with a share of the run's optimizer steps."""

from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback
from torch import nn

from lathe.errors import UserError


class Compression(Callback):
    """A method of compression, listed under `compression` in the configuration.

    `window` is the share of the run's optimizer steps in which the method acts; `compression.stages` sets it before
    training. What a method schedules as shares (its start, its end) are shares of that window. What it has done to the
    net stays when its window has passed.
    """

    window: tuple[float, float] = (0.0, 1.0)
    removes_late = False  # whether parts of parameters go after training; `leaving` says which, once they are chosen

    def step_at(self, trainer: Trainer, share: float) -> int:
        """The optimizer step at which `share` of the window has gone by; 0 is before the run's first step."""
        start, end = self.window
        return round((start + share * (end - start)) * self.total_steps(trainer))

    def total_steps(self, trainer: Trainer) -> int:
        """Optimizer steps of the whole run.

        Raises:
            UserError: the run has no end, and so no shares.
        """
        steps = trainer.estimated_stepping_batches
        if steps == float("inf"):
            raise UserError(
                "trainer.max_epochs=-1 and trainer.max_steps=-1 have no end for compression to plan for: set one of "
                "them."
            )
        return int(steps)

    def check(self, net: nn.Module) -> None:
        """Raises UserError where the method can't act on `net`, which is left alone; called before any data is
        touched.
        """

    def ready(self, trainer: Trainer) -> bool:
        """Whether the net is as it will ship but for its weights' values: only then is an epoch compared for
        best.ckpt.
        """
        return True

    def finalise(self, net: nn.Module, datamodule: Any) -> bool:
        """Acts on the best weights after training, in one process on the CPU; the data module is set up and has no
        trainer. Returns whether the net has changed, so that best.ckpt is written anew and validated again."""
        return False

    def leaving(self) -> dict[str, dict[int, set[int]]]:
        """What this method has chosen to remove from parameters after training: positions, by parameter name and
        dimension.
        """
        return {}

    def report(self) -> dict[str, float]:
        """Metrics for result.json, such as {"prune/sparsity": 0.8}."""
        return {}


def compressions(trainer: Trainer) -> list[Compression]:
    """The methods of compression that take part in a run."""
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return [callback for callback in callbacks if isinstance(callback, Compression)]
