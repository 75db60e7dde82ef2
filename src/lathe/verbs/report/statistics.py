"""Means, intervals and paired differences of a few numbers, one for each seed or fold."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

RESAMPLES = 10_000  # of the bootstrap
ROUNDING = 1e-12  # relative: smaller differences are floating-point errors
FEW = 5  # with fewer numbers an interval is reported as wide


@dataclass(frozen=True)
class Interval:
    """An interval: `kind` is t (normal errors) or bootstrap (percentiles), `share` the confidence."""

    kind: str = "t"
    share: float = 0.95
    seed: int = 0

    @property
    def percent(self) -> str:
        """The confidence as text."""
        return f"{100 * self.share:g} %"


@dataclass(frozen=True)
class Summary:
    """A summary of n numbers; `std` divides by n - 1, `why` is a caveat on the interval."""

    n: int
    mean: float | None
    std: float | None
    interval: tuple[float, float] | None
    why: str | None


@dataclass(frozen=True)
class Paired:
    """The mean difference over `n` pairs, its interval, and the two-sided p of Student's paired t test."""

    n: int
    difference: float | None
    interval: tuple[float, float] | None
    p: float | None


def summarise(values: Sequence[float], how: Interval) -> Summary:
    """Return the mean of independent numbers, with its interval."""
    return _summarised(tuple(values), how)


@lru_cache(maxsize=100_000)  # every file of a report needs it, and a bootstrap is slow
def _summarised(values: tuple[float, ...], how: Interval) -> Summary:
    n = len(values)
    if not n:
        return Summary(0, None, None, None, "no complete run")
    mean = math.fsum(values) / n
    if n == 1:
        return Summary(1, mean, None, None, "n = 1: no interval")
    std = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1))
    if std <= ROUNDING * max(map(abs, values)):
        return Summary(n, mean, 0.0, None, f"all {n} values are equal: no interval")
    wide = None
    if n < FEW:
        wide = f"n = {n}: the interval is {'wide' if how.kind == 't' else 'narrower than it should be'}"
    return Summary(n, mean, std, _interval(values, mean, std, how), wide)


def compare(a: Sequence[float], b: Sequence[float], how: Interval) -> Paired:
    """Return the paired difference `a` - `b`."""
    differences = [mine - theirs for mine, theirs in zip(a, b, strict=True)]
    told = summarise(differences, how)
    if told.interval is None or told.mean is None or told.std is None:
        return Paired(told.n, told.mean, None, None)
    return Paired(told.n, told.mean, told.interval, _p(told.mean, told.std, told.n))


def _interval(values: Sequence[float], mean: float, std: float, how: Interval) -> tuple[float, float]:
    if how.kind == "bootstrap":
        return _bootstrap(values, how)
    from scipy.special import stdtrit  # imported here, since only a report needs it

    half = float(stdtrit(len(values) - 1, 0.5 + how.share / 2)) * std / math.sqrt(len(values))
    return mean - half, mean + half


def _bootstrap(values: Sequence[float], how: Interval) -> tuple[float, float]:
    import numpy as np
    from scipy.stats import bootstrap

    told = bootstrap(
        (np.asarray(values),),
        np.mean,
        n_resamples=RESAMPLES,
        confidence_level=how.share,
        method="percentile",
        rng=how.seed,
    )
    return float(told.confidence_interval.low), float(told.confidence_interval.high)


def _p(mean: float, std: float, n: int) -> float:
    from scipy.special import stdtr

    return float(2 * stdtr(n - 1, -abs(mean) / (std / math.sqrt(n))))
