"""The logger of a command that keeps none."""

from typing import Any

from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_only


class Unkept(DummyLogger):
    """Takes what a module logs and keeps nothing: one that gives images to `self.logger.experiment` in its
    validation_step is evaluated as it was trained. The first time that it does, a line says so.
    """

    def __init__(self) -> None:
        super().__init__()
        self._told = False

    @property
    def experiment(self) -> Any:
        if not self._told:
            self._told = True
            rank_zero_only(print)("This command has no logger: what is given to self.logger.experiment is not kept.")
        return super().experiment
