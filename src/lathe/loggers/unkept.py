"""The logger of commands that log nothing."""

from typing import Any

from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_only


class Unkept(DummyLogger):
    """Discard what a module logs, also through `experiment`, with a note the first time."""

    def __init__(self) -> None:
        super().__init__()
        self._told = False

    @property
    def experiment(self) -> Any:
        if not self._told:
            self._told = True
            rank_zero_only(print)("This command has no logger: what is given to self.logger.experiment is not kept.")
        return super().experiment
