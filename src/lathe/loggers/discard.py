"""The logger of commands that log nothing."""

from collections.abc import Callable
from typing import Any

from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_only


class Discarded:
    """An `experiment` that takes calls of any name and discards them, with the `reason` printed at the first one."""

    def __init__(self, reason: str) -> None:
        self._reason: str | None = reason

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._discard

    def __getitem__(self, index: int) -> "Discarded":
        return self

    def _discard(self, *args: Any, **kwargs: Any) -> None:
        if self._reason is not None:
            rank_zero_only(print)(f"{self._reason}: what is given to logger.experiment is not kept.", flush=True)
            self._reason = None


class Discard(DummyLogger):
    """Discard what a module logs."""

    def __init__(self) -> None:
        super().__init__()
        self._experiment = Discarded("This command has no logger")  # type: ignore[assignment]
