"""Optimizer steps at which something is due."""

import math
from typing import Any


def reached(trainer: Any, interval: int) -> bool:
    """Return whether the last batch ended at or passed a multiple of `interval` optimizer steps."""
    step, before = trainer.global_step, getattr(trainer._logger_connector, "batch_began_at", None)
    return bool(step % interval == 0 if before is None else step // interval > before // interval)


def steps_before(trainer: Any, interval: int | None) -> float:
    """Count the steps before the one that ends at a multiple of `interval`; inf if that is None or 0."""
    return interval - 1 - trainer.global_step % interval if interval else math.inf
