"""Opt-in of a callback to several optimizer steps per call (`trainer.steps_per_call`)."""

import math
from typing import Any


class SkippableHooks:
    """Mixin for a callback that does not need all of its hooks around a batch at every step.

    `skippable_steps` is what a callback has to define; it need not derive from this class. Steps run one by one
    with a callback that overrides a hook around a batch and does not define it. A subclass that overrides a hook again
    has to define it again.

    `every_step` names the hooks that run at every step all the same: on_train_batch_start, on_before_backward,
    on_before_optimizer_step or on_train_batch_end.

    These methods are optional, and not defined here:

    - `on_skipped_steps(trainer, pl_module, batches, waited)` is called after a group of steps with its batches and the
      seconds that it waited for them.
    - `can_defer_log(trainer) -> bool`: the next step that the callback needs can run inside a group, as the callback
      only logs a row at it. `deferred_row_at_start(trainer)`, before that step's forward pass, or
      `deferred_row(trainer)`, after its update, returns the row or None. `complete_deferred_rows(trainer)` is called
      after the group, before its rows are written. For one process.
    - `on_whole_step(trainer, pl_module, loss)` is called after a step that is one compiled function
      (`compile.scope=step`), in place of the hooks inside it.
    """

    every_step: tuple[str, ...] = ("on_train_batch_end",)

    def skippable_steps(self, trainer: Any) -> float:
        """Return how many of the next steps do not need the hooks that are not in `every_step`."""
        return math.inf
