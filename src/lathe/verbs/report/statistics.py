"""Means, intervals, paired tests and the importance of factors, by scipy.stats, which only a report imports."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from lathe.verbs.runs.reader import is_number

RESAMPLES = 10_000  # of the bootstrap
ROUNDING = 1e-12  # relative: smaller differences are floating-point errors
FEW = 5  # with fewer numbers an interval is reported as wide
MINIMUM = 20  # complete runs: in 1 of 20 cases chance gives a factor of two levels 18 %; with ten runs 37 %
CUT = 4  # numeric factors with more values are cut into this many bins
WAY = 0.3  # rank correlation from which a direction is reported


@dataclass(frozen=True)
class Interval:
    """Settings of intervals: `kind` is t (normal errors) or bootstrap (percentiles)."""

    kind: str = "t"
    confidence: float = 0.95
    seed: int = 0

    @property
    def percent(self) -> str:
        """The confidence as text."""
        return f"{100 * self.confidence:g} %"


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
    """The mean difference over `n` pairs, its interval, and the two-sided p of Student's paired t test.

    `p_holm` and `p_bh` are p corrected for all comparisons of a metric, by Holm and by Benjamini and Hochberg.
    """

    n: int
    difference: float | None
    interval: tuple[float, float] | None
    p: float | None
    p_holm: float | None = None
    p_bh: float | None = None


@lru_cache(maxsize=100_000)  # every file of a report needs it, and a bootstrap is slow
def summarise(values: tuple[float, ...], how: Interval, share: bool = False) -> Summary:
    """Return the mean of independent numbers, with its interval, which for a `share` ends at 0 and 1."""
    n = len(values)
    if n < 2:
        return Summary(n, values[0] if values else None, None, None, "n = 1: no interval" if n else "no complete run")
    mean, std = statistics.fmean(values), statistics.stdev(values)
    if std <= ROUNDING * max(map(abs, values)):
        return Summary(n, mean, 0.0, None, f"all {n} values are equal: no interval")
    low, high = _interval(values, how)
    if share and min(values) >= 0 and max(values) <= 1:
        low, high = max(low, 0.0), min(high, 1.0)
    wide = "wide" if how.kind == "t" else "narrower than it should be"
    return Summary(n, mean, std, (low, high), f"n = {n}: the interval is {wide}" if n < FEW else None)


def _interval(values: Sequence[float], how: Interval) -> tuple[float, float]:
    import numpy as np
    from scipy import stats

    if how.kind == "t":
        found = stats.ttest_1samp(values, 0.0).confidence_interval(how.confidence)
    else:
        found = stats.bootstrap(
            (np.asarray(values),),
            np.mean,
            n_resamples=RESAMPLES,
            confidence_level=how.confidence,
            method="percentile",
            rng=how.seed,
        ).confidence_interval
    return float(found.low), float(found.high)


def compare(a: Sequence[float], b: Sequence[float], how: Interval) -> Paired:
    """Return the paired difference `a` - `b`."""
    from scipy import stats

    told = summarise(tuple(mine - theirs for mine, theirs in zip(a, b, strict=True)), how)
    p = None if told.interval is None else float(stats.ttest_rel(a, b).pvalue)
    return Paired(told.n, told.mean, told.interval, p)


def corrected(values: Sequence[float]) -> list[tuple[float, float]]:
    """Return each p corrected for the number of comparisons: by Holm (1979), and by Benjamini and Hochberg (1995)."""
    from scipy import stats

    n, highest = len(values), 0.0
    holm = [0.0] * n
    for rank, at in enumerate(sorted(range(n), key=lambda at: values[at])):
        holm[at] = highest = max(highest, min(1.0, (n - rank) * values[at]))
    return list(zip(holm, map(float, stats.false_discovery_control(values)), strict=True)) if n else []


def importance(data: dict[str, Any]) -> dict[str, Any]:
    """Return rows of factor, share (0 to 1), levels and direction; or `why` there are none.

    The share is epsilon squared of the Kruskal-Wallis test (Kelley, 1935; Tomczak and Tomczak, 2014): the variance of
    ranks between a factor's levels, corrected for chance, at least 0. Numeric factors with more than `CUT` values are
    cut into `CUT` bins of about equal size, so that an optimum in the middle counts. The direction is Spearman's rank
    correlation of numbers, None if it is weaker than `WAY`. `data` is that of the page.
    """
    scored = [(run["metrics"].get(data["metric"]), run) for run in data["runs"] if run["state"] == "complete"]
    runs = [(value, run["factors"]) for value, run in scored if is_number(value) and value == value]
    found: dict[str, Any] = {"rows": [], "why": None, "n": len(runs), "cut": CUT}
    if len(runs) < MINIMUM:
        have = "run has" if len(runs) == 1 else "runs have"
        why = f"{len(runs)} complete {have} {data['metric']}, and importance needs {MINIMUM}: of fewer, "
        return found | {"why": f"{why}a factor that does nothing looks important by chance."}
    values = [value for value, _ in runs]
    if len(set(values)) == 1:
        return found | {"why": f"Every complete run has the same {data['metric']}: there is nothing to explain."}
    rows = [_importance_row(factor, [own.get(factor) for _, own in runs], values) for factor in data["factors"]]
    known = sorted((row for row in rows if row is not None), key=lambda row: -row["share"])
    return found | {
        "rows": known,
        "why": None if known else "No factor has levels with two runs each: there is nothing to average over.",
    }


def _importance_row(factor: str, levels: Sequence[Any], metric: Sequence[float]) -> dict[str, Any] | None:
    from scipy import stats

    numbers, n = all(map(is_number, levels)), len(levels)
    if numbers and len(set(levels)) > CUT:
        names = [str(min(CUT - 1, int(CUT * (rank - 0.5) / n))) for rank in stats.rankdata(levels)]
    else:
        names = list(map(repr, levels))
    by: dict[str, list[float]] = {}
    for name, value in zip(names, metric, strict=True):
        by.setdefault(name, []).append(value)
    k = len(by)
    if k < 2 or 2 * k > n:
        return None
    explained = float(stats.kruskal(*by.values()).statistic) / (n - 1)
    share = max(0.0, 1 - (1 - explained) * (n - 1) / (n - k))
    way = float(stats.spearmanr(levels, metric).statistic) if numbers else 0.0
    return {"factor": factor, "share": share, "levels": k, "direction": way if abs(way) >= WAY else None}
