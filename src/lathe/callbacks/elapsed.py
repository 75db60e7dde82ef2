"""How long a run has taken, over all its processes."""

from time import monotonic
from typing import Any

from lightning.pytorch.callbacks import Callback


class Elapsed(Callback):
    """`seconds` since it was made, and those that earlier processes of the run had spent by the checkpoint that it goes
    on from; what they did after that is made again, and counts once."""

    def __init__(self) -> None:
        self._began, self._before = monotonic(), 0.0

    @property
    def seconds(self) -> float:
        return self._before + monotonic() - self._began

    def state_dict(self) -> dict[str, Any]:
        return {"seconds": self.seconds}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._before = state_dict["seconds"]
