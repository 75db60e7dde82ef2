"""A Trainer on CPUs without output, and batches in memory."""

from collections.abc import Iterator
from typing import Any

from lathe.trainer import Trainer

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "devices": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "use_distributed_sampler": False,
}


def quiet_trainer(*callbacks: Any, **options: Any) -> Trainer:
    return Trainer(callbacks=list(callbacks), **{**QUIET, **options})


class Batches:
    """Batches that remember their position, as a checkpoint stores it."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches, self.done, self.begin = batches, 0, 0

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        begin, self.begin = self.begin, 0
        for i, batch in enumerate(self.batches[begin:], begin):
            self.done = i + 1
            yield batch

    def state_dict(self) -> dict[str, int]:
        return {"done": self.done % len(self.batches)}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.begin = state["done"]
