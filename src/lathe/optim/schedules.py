"""Learning-rate schedules, one function per choice in `configs/scheduler/`.

They are stepped after every optimizer step. `optimizer.lr` is always the peak. A position such as `warmup` is a share
of the run if it is below 1, and otherwise a number of optimizer steps. Every schedule is a `LambdaLR` over a closure:
its state is only the step, so it opens with `weights_only`, and a longer run that resumes from it follows its own,
longer curve. All raise ArgumentError if a position is not below the run's length.

Curves are factors of the peak by the number of optimizer steps so far: 0 gives the rate of the first step, `total - 1`
that of the last, and from `total` on the curve is constant.
"""

import math
from collections.abc import Callable, Sequence
from typing import Annotated

from pydantic import Field
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from lathe.config.types import Count, OpenShare, Share, StepOrShare
from lathe.config.validation import validated
from lathe.errors import ArgumentError


def half_cosine(progress: float, *, start: float, end: float) -> float:
    """Return a half cosine from `start` at progress 0 to `end` at 1; progress is clamped to [0, 1]."""
    return end + (start - end) * 0.5 * (1 + math.cos(math.pi * min(max(progress, 0.0), 1.0)))


def steps_of(key: str, value: float, total_steps: int) -> int:
    """Return the position `key` in optimizer steps: a share of the run below 1, else a number of steps.

    A share is rounded, and stays below the end of the run.
    """
    if value < 1:
        return min(round(value * total_steps), max(total_steps - 1, 0))
    if value >= total_steps:
        raise ArgumentError(
            f"{key}={value} is not below the run's {total_steps} optimizer steps: lower it or train longer."
        )
    return int(value)


def _after_warmup(
    optimizer: Optimizer, total_steps: int, warmup: float, curve: Callable[[int, int], float]
) -> LRScheduler:
    """Return a line from 0 before the first step to the peak at `warmup`, then `curve`.

    `curve` takes the number of steps after the warm-up, and how many of them the run has.
    """
    warm = steps_of("warmup", warmup, total_steps)
    rest = max(total_steps - warm, 1)
    return LambdaLR(optimizer, lambda step: (step + 1) / (warm + 1) if step < warm else curve(step - warm, rest))


@validated
def constant(optimizer: Optimizer, total_steps: int, *, warmup: StepOrShare = 0) -> LRScheduler:
    """Return a line up to the peak over `warmup`, then the peak."""
    return _after_warmup(optimizer, total_steps, warmup, lambda step, rest: 1.0)


@validated
def cosine(optimizer: Optimizer, total_steps: int, *, warmup: StepOrShare = 0, min_ratio: Share = 0) -> LRScheduler:
    """Return a line up to the peak over `warmup`, then a half cosine down to `min_ratio` of it at the end.

    Loshchilov and Hutter 2017, arXiv:1608.03983, without restarts.
    """
    return _after_warmup(
        optimizer, total_steps, warmup, lambda step, rest: half_cosine(step / rest, start=1.0, end=min_ratio)
    )


@validated
def cosine_restarts(
    optimizer: Optimizer,
    total_steps: int,
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
    first = float(max(steps_of("period", period, total_steps), 1))

    def curve(step: int, rest: int) -> float:
        since, length = float(step), first
        while since >= length:
            since -= length
            length *= period_growth
        return half_cosine(since / length, start=1.0, end=min_ratio)

    return _after_warmup(optimizer, total_steps, warmup, curve)


@validated
def linear(optimizer: Optimizer, total_steps: int, *, warmup: StepOrShare = 0, end_ratio: Share = 0) -> LRScheduler:
    """Return a line up to the peak over `warmup`, then one down to `end_ratio` of it at the end."""
    return _after_warmup(optimizer, total_steps, warmup, lambda step, rest: 1 - (1 - end_ratio) * min(step / rest, 1.0))


@validated
def one_cycle(
    optimizer: Optimizer,
    total_steps: int,
    *,
    warmup: StepOrShare = 0.3,
    start_ratio: Share = 0.04,
    end_ratio: Share = 4e-6,
) -> LRScheduler:
    """Return a half cosine from `start_ratio` to 1 over `warmup`, then one to `end_ratio` at the end.

    Smith and Topin 2018, arXiv:1708.07120, in the two-phase form of torch's `OneCycleLR` with its default ratios, and
    constant momentum.
    """
    peak, total = steps_of("warmup", warmup, total_steps), max(total_steps, 1)

    def curve(step: int) -> float:
        if step < peak:
            return half_cosine(step / peak, start=start_ratio, end=1.0)
        return half_cosine((step - peak) / (total - peak), start=1.0, end=end_ratio)

    return LambdaLR(optimizer, curve)


@validated
def step(
    optimizer: Optimizer,
    total_steps: int,
    *,
    milestones: Sequence[StepOrShare],
    gamma: Share = 0.1,
    warmup: StepOrShare = 0,
) -> LRScheduler:
    """Return a line up to the peak over `warmup`, multiplied by `gamma` at each of the `milestones`."""
    warm = steps_of("warmup", warmup, total_steps)
    reached = [steps_of("milestones", milestone, total_steps) for milestone in milestones]
    if reached != sorted(reached):
        raise ArgumentError(f"milestones={list(milestones)} must rise: put them in order.")

    def curve(step: int) -> float:
        line = 1.0 if step >= warm else (step + 1) / (warm + 1)
        return line * gamma ** sum(step >= milestone for milestone in reached)

    return LambdaLR(optimizer, curve)
