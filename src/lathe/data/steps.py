"""Which batches end at an optimizer step that something is due at."""

from typing import Any


def reached(trainer: Any, every: int) -> bool:
    """Whether the optimizer step that the last batch ended with is a multiple of `every`, or the first behind one: a
    module that steps its optimizers itself may make several in a batch, or none.
    """
    step, before = trainer.global_step, getattr(trainer._logger_connector, "batch_began_at", None)
    return bool(step % every == 0 if before is None else step // every > before // every)
