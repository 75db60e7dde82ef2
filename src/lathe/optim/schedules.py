"""Learning-rate schedules, one function per choice in `configs/scheduler/`.

They are stepped after every optimizer step. `optimizer.lr` is always the peak. A position such as `warmup` is a share
of the run if it is below 1, and otherwise a number of optimizer steps. Every schedule is a `LambdaLR` over a closure:
its state is only the step, so it opens with `weights_only`, and a longer run that resumes from it follows its own,
longer curve. All raise ArgumentError if a position is not below the run's length.

The curves are the functions `..._factor` of the number of optimizer steps so far: 0 gives the rate of the first step,
`total - 1` that of the last, and from `total` on the curve is constant.
"""

import math
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import Field
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from lathe.config.types import Count, OpenShare, Share, StepOrShare
from lathe.config.validation import validated
from lathe.errors import ArgumentError, UserError

TotalSteps = Any  # optimizer steps of the run; inf for an endless run, which raises an error


def warm_up(step: int, *, warmup: int) -> float:
    """Return a line from 0 at step -1 to 1 at `step == warmup`, then 1; a first rate of 0 would be wasted."""
    return 1.0 if step >= warmup else (step + 1) / (warmup + 1)


def half_cosine(progress: float, *, start: float, end: float) -> float:
    """Return a half cosine from `start` at progress 0 to `end` at 1; progress is clamped to [0, 1]."""
    return end + (start - end) * 0.5 * (1 + math.cos(math.pi * min(max(progress, 0.0), 1.0)))


def linear_factor(step: int, *, total: int, warmup: int, end_ratio: float) -> float:
    """Return the warm-up, then a line from 1 at `warmup` to `end_ratio` at `total`."""
    if step < warmup:
        return warm_up(step, warmup=warmup)
    return 1 - (1 - end_ratio) * min((step - warmup) / (total - warmup), 1.0)


def cosine_factor(step: int, *, total: int, warmup: int, min_ratio: float) -> float:
    """Return the warm-up, then a half cosine from 1 at `warmup` to `min_ratio` at `total`."""
    if step < warmup:
        return warm_up(step, warmup=warmup)
    return half_cosine((step - warmup) / (total - warmup), start=1.0, end=min_ratio)


def restarts_factor(step: int, *, warmup: int, period: int, period_growth: float, min_ratio: float) -> float:
    """Return the warm-up, then half cosines to `min_ratio` of `period`, `period * period_growth`, ... steps."""
    if step < warmup:
        return warm_up(step, warmup=warmup)
    since, length = float(step - warmup), float(period)
    while since >= length:
        since -= length
        length *= period_growth
    return half_cosine(since / length, start=1.0, end=min_ratio)


def one_cycle_factor(step: int, *, total: int, warmup: int, start_ratio: float, end_ratio: float) -> float:
    """Return a half cosine from `start_ratio` to 1 at `warmup`, then one to `end_ratio` at `total`."""
    if step < warmup:
        return half_cosine(step / warmup, start=start_ratio, end=1.0)
    return half_cosine((step - warmup) / (total - warmup), start=1.0, end=end_ratio)


def step_factor(step: int, *, warmup: int, milestones: Sequence[int], gamma: float) -> float:
    """Return the warm-up, times `gamma` for each milestone that has been reached."""
    return warm_up(step, warmup=warmup) * gamma ** sum(step >= milestone for milestone in milestones)


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


@validated
def constant(optimizer: Optimizer, total_steps: TotalSteps, *, warmup: StepOrShare = 0) -> LRScheduler:
    """Return a line up to the peak over `warmup`, then the peak."""
    warmup_steps = steps_of("warmup", warmup, _whole_run(total_steps))
    return LambdaLR(optimizer, lambda step: warm_up(step, warmup=warmup_steps))


@validated
def cosine(
    optimizer: Optimizer, total_steps: TotalSteps, *, warmup: StepOrShare = 0, min_ratio: Share = 0
) -> LRScheduler:
    """Return a line up to the peak over `warmup`, then a half cosine down to `min_ratio` of it at the end.

    Loshchilov and Hutter 2017, arXiv:1608.03983, without restarts.
    """
    total = _whole_run(total_steps)
    warmup_steps = steps_of("warmup", warmup, total)
    return LambdaLR(optimizer, lambda step: cosine_factor(step, total=total, warmup=warmup_steps, min_ratio=min_ratio))


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
    return LambdaLR(
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
    return LambdaLR(optimizer, lambda step: linear_factor(step, total=total, warmup=warmup_steps, end_ratio=end_ratio))


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
    return LambdaLR(
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
    return LambdaLR(optimizer, lambda step: step_factor(step, warmup=warmup_steps, milestones=reached, gamma=gamma))
