"""Learning rates of a module that steps its optimizers itself: how many steps a batch makes is known at its end, and
what they were made with at its beginning.
"""

from typing import Any

from lightning.pytorch.callbacks import LearningRateMonitor
from torch import Tensor


class Rates:
    """Notes what `LearningRateMonitor` logs as a batch begins, and has it logged once the batch's row is known."""

    def __init__(self) -> None:
        self._noted: list[tuple[dict[str, Any], dict[str, Any]]] = []

    def note(self, trainer: Any) -> None:
        self._noted = [
            (group, {name: _kept(value) for name, value in group.items() if name != "params"})
            for optimizer in trainer.optimizers
            for group in optimizer.param_groups
        ]

    def log(self, trainer: Any) -> None:
        """Once for each batch; the groups have the noted values meanwhile."""
        noted, self._noted = self._noted, []
        now = [dict(group) for group, _ in noted]
        try:
            for group, before in noted:
                group.update(before)
            for monitor in trainer.callbacks if noted else ():
                if isinstance(monitor, LearningRateMonitor):
                    LearningRateMonitor.on_train_batch_start(monitor, trainer)
        finally:
            for (group, _), after in zip(noted, now, strict=True):
                group.update(after)


def _kept(value: Any) -> Any:
    """A rate that is a tensor changes in its place."""
    return value.clone() if isinstance(value, Tensor) else value
