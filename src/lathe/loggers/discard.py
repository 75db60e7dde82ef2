"""The logger of commands that log nothing."""

from typing import Any

from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_only


class Discard(DummyLogger):
    """Discard what a module logs, also through `experiment`, and print the `reason` the first time."""

    def __init__(self, reason: str = "This command has no logger") -> None:
        super().__init__()
        self._reason = reason
        self._printed = False

    @property
    def experiment(self) -> Any:
        if not self._printed:
            self._printed = True
            rank_zero_only(print)(f"{self._reason}: what is given to self.logger.experiment is not kept.", flush=True)
        return super().experiment
