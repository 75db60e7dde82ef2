"""Which batches end at an optimizer step that something is due at."""

import math
from typing import Any


def reached(trainer: Any, every: int) -> bool:
    """Whether the optimizer step that the last batch ended with is a multiple of `every`, or the first behind one: a
    module that steps its optimizers itself may make several in a batch, or none.
    """
    step, before = trainer.global_step, getattr(trainer._logger_connector, "batch_began_at", None)
    return bool(step % every == 0 if before is None else step // every > before // every)


def steps_before(trainer: Any, every: int | None) -> float:
    """Count the optimizer steps before the next multiple of `every`; inf where that is None or 0."""
    return every - 1 - trainer.global_step % every if every else math.inf
