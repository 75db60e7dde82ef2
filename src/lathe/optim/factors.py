"""Learning-rate factors as pure functions of the optimizer step.

A factor multiplies the learning rate of a parameter group. `step` is the number of optimizer steps so far: 0 gives the
rate of the first step, `total - 1` that of the last, and from `total` on the curve is constant.
"""

import math
from collections.abc import Sequence


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
