"""Numbers of batches and steps that a run has no room for."""

from collections.abc import Iterator
from math import ceil, inf
from typing import Any


def out_of_reach(trainer: Any) -> Iterator[str]:
    """A sentence for each: more batches to a step than an epoch has, and more steps at least than the run ends with.

    Args:
        trainer: of a fit whose data are known.
    """
    batches, every = trainer.num_training_batches, trainer.accumulate_grad_batches
    if not batches or batches == inf:
        return
    if every > batches:
        yield (
            f"trainer.accumulate_grad_batches={every}: an epoch has {batches} batches and its end makes a step, so no "
            "step is of more than these."
        )
    loop = trainer.fit_loop
    if loop.min_steps and loop.max_epochs not in (None, -1):
        steps = loop.max_epochs * ceil(batches / every)
        if loop.min_steps > steps:
            yield (
                f"trainer.min_steps={loop.min_steps} is out of reach: trainer.max_epochs={loop.max_epochs} ends the "
                f"run after {steps} steps."
            )
