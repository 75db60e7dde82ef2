"""Optimizer steps without what Lightning does around each.

Lightning 2.6 spends about a quarter of a millisecond on a step beside the step: contexts of a profiler that measures
nothing, batches that are moved to where they are, hooks that nobody overrides, metrics that nobody has logged. Here
everything that somebody does override is called in Lightning's order, with Lightning's counters at the same values, and
nothing else is done between two places at which Lightning has something of its own to do: a validation, the end of an
epoch, a stop.
"""

from lathe.tasks.loops.evaluation import EvaluationLoop
from lathe.tasks.loops.fit import FitLoop
from lathe.tasks.loops.quiet import until
from lathe.tasks.loops.training import StepLoop
from lathe.tasks.loops.window import Optimization

__all__ = ["EvaluationLoop", "FitLoop", "Optimization", "StepLoop", "until"]
