"""Learning-rate schedules, one function per choice in `configs/scheduler/`.

They are stepped after every optimizer step. `optimizer.lr` is always the peak. A position such as `warmup` is a share
of the run if it is below 1, and otherwise a number of optimizer steps. Every schedule is a `LambdaLR` over a closure:
its state is only the step, so it opens with `weights_only`, and a longer run that resumes from it follows its own,
longer curve. All raise ArgumentError if a position is not below the run's length.
"""

import math
from collections.abc import Callable, Sequence
from typing import Annotated, Any

from pydantic import Field
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from lathe.config.types import Count, OpenShare, Share, StepOrShare
from lathe.config.validation import validated
from lathe.errors import ArgumentError, UserError
from lathe.optim.factors import (
    cosine_factor,
    linear_factor,
    one_cycle_factor,
    restarts_factor,
    step_factor,
    warm_up,
)

TotalSteps = Any  # optimizer steps of the run; inf for an endless run, which raises an error


def steps_of(key: str, value: float, total_steps: int) -> int:
    """Return the position `key` in optimizer steps: a share of the run below 1, else a number of steps.

    A share is rounded, and stays below the end of the run. Raises ArgumentError if `value` is not below `total_steps`.
    """
    if value < 1:
        return min(round(value * total_steps), max(total_steps - 1, 0))
    if value >= total_steps:
        raise ArgumentError(
            f"{key}={value} is not below the run's {total_steps} optimizer steps: lower it or train longer."
        )
    return int(value)


def _whole_run(total_steps: float) -> int:
    """Return the run's steps; Lightning reports inf for an endless run and 0 if nothing is trained."""
    if not 0 <= total_steps < math.inf:
        raise UserError(
            f"A scheduler can't plan a run of {total_steps} steps: set max_epochs or max_steps, and "
            "limit_train_batches above 0."
        )
    return max(int(total_steps), 1)


def _schedule(optimizer: Optimizer, factor: Callable[[int], float]) -> LRScheduler:
    return LambdaLR(optimizer, factor)


@validated
def constant(optimizer: Optimizer, total_steps: TotalSteps, *, warmup: StepOrShare = 0) -> LRScheduler:
    """Return a line up to the peak over `warmup`, then the peak."""
    warmup_steps = steps_of("warmup", warmup, _whole_run(total_steps))
    return _schedule(optimizer, lambda step: warm_up(step, warmup=warmup_steps))


@validated
def cosine(
    optimizer: Optimizer, total_steps: TotalSteps, *, warmup: StepOrShare = 0, min_ratio: Share = 0
) -> LRScheduler:
    """Return a line up to the peak over `warmup`, then a half cosine down to `min_ratio` of it at the end.

    Loshchilov and Hutter 2017, arXiv:1608.03983, without restarts.
    """
    total = _whole_run(total_steps)
    warmup_steps = steps_of("warmup", warmup, total)
    return _schedule(optimizer, lambda step: cosine_factor(step, total=total, warmup=warmup_steps, min_ratio=min_ratio))


@validated
def cosine_restarts(
    optimizer: Optimizer,
    total_steps: TotalSteps,
    *,
    period: Count | OpenShare,
    period_growth: Annotated[float, Field(ge=1)] = 1,
    warmup: StepOrShare = 0,
    min_ratio: Share = 0,
) -> LRScheduler:
    """Return a line up to the peak over `warmup`, then repeated half cosines from the peak to `min_ratio`.

    SGDR, Loshchilov and Hutter 2017, arXiv:1608.03983: the first half cosine has length `period`, each next one
    `period_growth` times the length of the last.
    """
    total = _whole_run(total_steps)
    warmup_steps = steps_of("warmup", warmup, total)
    first = max(steps_of("period", period, total), 1)
    return _schedule(
        optimizer,
        lambda step: restarts_factor(
            step, warmup=warmup_steps, period=first, period_growth=period_growth, min_ratio=min_ratio
        ),
    )


@validated
def linear(
    optimizer: Optimizer, total_steps: TotalSteps, *, warmup: StepOrShare = 0, end_ratio: Share = 0
) -> LRScheduler:
    """Return a line up to the peak over `warmup`, then one down to `end_ratio` of it at the end."""
    total = _whole_run(total_steps)
    warmup_steps = steps_of("warmup", warmup, total)
    return _schedule(optimizer, lambda step: linear_factor(step, total=total, warmup=warmup_steps, end_ratio=end_ratio))


@validated
def one_cycle(
    optimizer: Optimizer,
    total_steps: TotalSteps,
    *,
    warmup: StepOrShare = 0.3,
    start_ratio: Share = 0.04,
    end_ratio: Share = 4e-6,
) -> LRScheduler:
    """Return a half cosine from `start_ratio` to 1 over `warmup`, then one to `end_ratio` at the end.

    Smith and Topin 2018, arXiv:1708.07120, in the two-phase form of torch's `OneCycleLR` with its default ratios, and
    constant momentum.
    """
    total = _whole_run(total_steps)
    warmup_steps = steps_of("warmup", warmup, total)
    return _schedule(
        optimizer,
        lambda step: one_cycle_factor(
            step, total=total, warmup=warmup_steps, start_ratio=start_ratio, end_ratio=end_ratio
        ),
    )


@validated
def step(
    optimizer: Optimizer,
    total_steps: TotalSteps,
    *,
    milestones: Sequence[StepOrShare],
    gamma: Share = 0.1,
    warmup: StepOrShare = 0,
) -> LRScheduler:
    """Return a line up to the peak over `warmup`, multiplied by `gamma` at each of the `milestones`."""
    total = _whole_run(total_steps)
    warmup_steps = steps_of("warmup", warmup, total)
    reached = [steps_of("milestones", milestone, total) for milestone in milestones]
    if reached != sorted(reached):
        raise ArgumentError(f"milestones={list(milestones)} must rise: put them in order.")
    return _schedule(optimizer, lambda step: step_factor(step, warmup=warmup_steps, milestones=reached, gamma=gamma))
