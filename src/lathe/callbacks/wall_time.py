"""Wall time of a run, accumulated across restarts."""

from time import monotonic
from typing import Any

from lightning.pytorch.callbacks import Callback


class WallTime(Callback):
    """Count `seconds` since construction, plus those of earlier processes up to the restored checkpoint."""

    def __init__(self) -> None:
        self._start, self._earlier = monotonic(), 0.0

    @property
    def seconds(self) -> float:
        return self._earlier + monotonic() - self._start

    def state_dict(self) -> dict[str, Any]:
        return {"seconds": self.seconds}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._earlier = state_dict["seconds"]
