"""The importance of factors in a sweep: the share of the variance of ranks that each explains."""

from collections.abc import Sequence
from statistics import mean
from typing import Any

MINIMUM = 20  # complete runs: in 1 of 20 cases chance gives a factor of two levels 18 %; with ten runs 37 %
CUT = 4  # numeric factors with more values are cut into this many bins
WAY = 0.3  # rank correlation from which a direction is reported


def importance(data: dict[str, Any]) -> dict[str, Any]:
    """Return rows of factor, share (0 to 1), levels and direction; or `why` there are none.

    The share is epsilon squared of the Kruskal-Wallis test (Kelley, 1935; Tomczak and Tomczak, 2014): the variance of
    ranks between a factor's levels, corrected for chance, at least 0. Numeric factors with more than `CUT` values are
    cut into `CUT` bins of about equal size, so that an optimum in the middle counts. The direction is Spearman's rank
    correlation of numbers, None if it is weaker than `WAY`.
    """
    runs = [run for run in data["runs"] if run["state"] == "complete" and _number(_metric(data, run))]
    found: dict[str, Any] = {"rows": [], "why": None, "n": len(runs), "cut": CUT}
    if len(runs) < MINIMUM:
        return found | {"why": _too_few(len(runs), data["metric"])}
    ranks = _ranks([_metric(data, run) for run in runs])
    if len(set(ranks)) == 1:
        return found | {"why": f"Every complete run has the same {data['metric']}: there is nothing to explain."}
    rows = [_row(factor, [run["factors"].get(factor) for run in runs], ranks) for factor in data["factors"]]
    told = sorted((row for row in rows if row is not None), key=lambda row: -row["share"])
    why = None if told else "No factor has levels with two runs each: there is nothing to average over."
    return found | {"rows": told, "why": why}


def _too_few(n: int, metric: str) -> str:
    return (
        f"{n} complete {'run has' if n == 1 else 'runs have'} {metric}, and importance needs {MINIMUM}: of fewer, a "
        "factor that does nothing looks important by chance."
    )


def _metric(data: dict[str, Any], run: dict[str, Any]) -> Any:
    return (run.get("metrics") or {}).get(data["metric"])


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value == value


def _row(factor: str, values: Sequence[Any], ranks: Sequence[float]) -> dict[str, Any] | None:
    numbers = all(map(_number, values))
    many = numbers and len(set(values)) > CUT
    levels = _parts(values) if many else list(map(repr, values))
    n, k = len(values), len(set(levels))
    if k < 2 or 2 * k > n:
        return None
    groups: dict[Any, list[float]] = {}
    for level, rank in zip(levels, ranks, strict=True):
        groups.setdefault(level, []).append(rank)
    centre = mean(ranks)
    between = sum(len(group) * (mean(group) - centre) ** 2 for group in groups.values())
    explained = between / sum((rank - centre) ** 2 for rank in ranks)
    share = max(0.0, 1 - (1 - explained) * (n - 1) / (n - k))
    way = _correlation(_ranks(values), ranks) if numbers else 0.0
    return {"factor": factor, "share": share, "levels": k, "direction": way if abs(way) >= WAY else None}


def _parts(values: Sequence[float]) -> list[int]:
    """Return the bin of each value, of `CUT` of about equal size; equal values share a bin."""
    return [min(CUT - 1, int(CUT * (rank - 0.5) / len(values))) for rank in _ranks(values)]


def _ranks(values: Sequence[float]) -> list[float]:
    """Return ranks from 1; equal values share their mean rank."""
    order = sorted(range(len(values)), key=lambda i: values[i])
    ranks, begin = [0.0] * len(values), 0
    while begin < len(order):
        end = begin
        while end < len(order) and values[order[end]] == values[order[begin]]:
            end += 1
        for i in order[begin:end]:
            ranks[i] = (begin + end + 1) / 2
        begin = end
    return ranks


def _correlation(a: Sequence[float], b: Sequence[float]) -> float:
    x, y = mean(a), mean(b)
    both = sum((p - x) * (q - y) for p, q in zip(a, b, strict=True))
    size = sum((p - x) ** 2 for p in a) * sum((q - y) ** 2 for q in b)
    return float(both / size**0.5) if size else 0.0
