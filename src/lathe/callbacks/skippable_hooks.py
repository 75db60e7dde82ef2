"""Opt-in of a callback to several optimizer steps per call (`trainer.steps_per_call`)."""

import math
from typing import Any


class SkippableHooks:
    """Mixin for a callback that does not need all of its per-batch hooks at every step.

    Steps run one by one with a callback that overrides a per-batch hook and does not define `skippable_steps`; it need
    not derive from this class. A subclass that overrides a hook again has to define it again. `skippable_steps = None`
    states that every step is needed. `every_step` names the hooks that run at every step nevertheless:
    on_train_batch_start, on_before_backward, on_before_optimizer_step or on_train_batch_end.

    These methods are optional, and not defined here:

    - `on_skipped_steps(trainer, pl_module, batches, waited)` is called after a group of steps with its batches and the
      seconds that it waited for them.
    - `can_defer_log(trainer) -> bool`: the next step that the callback needs can run inside a group, as the callback
      only logs a row at it. `deferred_row_at_start(trainer)`, before that step's forward pass, or
      `deferred_row(trainer)`, after its update, returns the row or None. `complete_deferred_rows(trainer)` is called
      after the group, before its rows are written. For one process.
    - `on_whole_step(trainer, pl_module, loss)` replaces the hooks inside a step that is one compiled function
      (`compile.scope=step`).
    """

    every_step: tuple[str, ...] = ("on_train_batch_end",)

    def skippable_steps(self, trainer: Any) -> float:
        """Count the next steps that do not need the hooks outside `every_step`."""
        return math.inf
