"""Optimizer steps at which something is due."""

import math
from typing import Any


def reached(trainer: Any, every: int) -> bool:
    """Return whether the last batch ended at or passed a multiple of `every` optimizer steps."""
    step, before = trainer.global_step, getattr(trainer._logger_connector, "batch_began_at", None)
    return bool(step % every == 0 if before is None else step // every > before // every)


def steps_before(trainer: Any, every: int | None) -> float:
    """Return the number of optimizer steps before the next multiple of `every`; inf if that is None or 0."""
    return every - 1 - trainer.global_step % every if every else math.inf
