"""The tables of a report: numbers once, as each kind of file spells them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from lathe.runs.cells import csv_text
from lathe.verbs.report.assemble import Report
from lathe.verbs.report.collect import Run
from lathe.verbs.report.cost import cost, mean_cost
from lathe.verbs.report.factors import short_names
from lathe.verbs.report.groups import Group, Pair, group_of
from lathe.verbs.report.metrics import available
from lathe.verbs.report.statistics import Summary

TITLES = {"bytes": "bytes", "macs": "MACs", "latency_ms": "latency (ms)"}


@dataclass(frozen=True)
class Row:
    """A group under one metric; `pair` is None for the baseline itself."""

    group: Group
    told: Summary
    best: float | None
    pair: Pair | None
    cost: dict[str, float | None]


def rows(report: Report, metric: str) -> list[Row]:
    """A row for each group, in their order."""
    pairs = {pair.a: pair for pair in report.pairs[metric]}
    return [
        Row(
            group,
            group.summary(metric, report.how),
            group.best(metric, report.directions[metric]),
            pairs.get(at),
            mean_cost(group),
        )
        for at, group in enumerate(report.groups)
    ]


def number(value: float | None) -> str:
    """As people read it: four decimals, fewer where it is large."""
    if value is None:
        return ""
    if float(value).is_integer() and abs(value) < 1e15:
        return f"{value:,.0f}"
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4f}" if abs(value) >= 1e-3 else f"{value:.3g}"


def span(interval: Sequence[float] | None) -> str:
    """An interval, or nothing."""
    return "" if interval is None else f"[{number(interval[0])}, {number(interval[1])}]"


def readable(report: Report, metric: str) -> tuple[list[str], list[list[str]]]:
    """Header and cells of a metric's table; columns of costs that nobody knows are left out."""
    told = rows(report, metric)
    header = [*short_names(report.factors), "n", "mean ± std", f"{report.how.percent} interval", "best"]
    cells = [_first(row) for row in told]
    if len(told) > 1:
        header += ["difference", "its interval", "p"]
        cells = [[*line, *_difference(row)] for line, row in zip(cells, told, strict=True)]
    costs: dict[str, list[float | None]] = {
        "seconds": [row.group.mean_of("seconds") for row in told],
        "parameters": [row.group.mean_of("parameters") for row in told],
        **{title: [row.cost[name] for row in told] for name, title in TITLES.items()},
    }
    known = {title: values for title, values in costs.items() if any(value is not None for value in values)}
    header += list(known)
    return header, [[*line, *(number(values[at]) for values in known.values())] for at, line in enumerate(cells)]


def _first(row: Row) -> list[str]:
    told = row.told
    mean = number(told.mean) + ("" if told.std is None else f" ± {number(told.std)}")
    return [*row.group.texts.values(), str(told.n), mean, span(told.interval), number(row.best)]


def _difference(row: Row) -> list[str]:
    if row.pair is None:
        return ["baseline", "", ""]
    told = row.pair.told
    sign = "+" if told.difference is not None and told.difference > 0 else ""
    return [sign + number(told.difference), span(told.interval), "" if told.p is None else f"{told.p:.2g}"]


def remarks(report: Report, metric: str, kept: Sequence[int] | None = None) -> Iterator[str]:
    """What has to be said of each row, or of those `kept`, a line each: why it has no interval, what its difference is
    worth, and what was left out of it."""
    told = rows(report, metric)
    for row in told if kept is None else [told[at] for at in kept]:
        said = [row.told.why] if row.told.why else []
        said += [row.pair.says] if row.pair is not None else []
        said += row.group.marks
        if said:
            yield f"{row.group.label}: {'; '.join(said)}"


def groups_csv(report: Report) -> str:
    """A line for each metric and group, numbers as they are."""
    lines: list[dict[str, Any]] = []
    for metric in report.metrics:
        for row in rows(report, metric):
            told, pair = row.told, row.pair.told if row.pair else None
            low, high = told.interval or (None, None)
            below, above = (pair.interval if pair else None) or (None, None)
            lines.append(
                {
                    "metric": metric,
                    "better": report.directions[metric],
                    **row.group.texts,
                    "n": told.n,
                    "mean": told.mean,
                    "std": told.std,
                    "low": low,
                    "high": high,
                    "best": row.best,
                    "pairs": pair.n if pair else None,
                    "difference": pair.difference if pair else None,
                    "difference_low": below,
                    "difference_high": above,
                    "p": pair.p if pair else None,
                    "seconds": row.group.mean_of("seconds"),
                    "parameters": row.group.mean_of("parameters"),
                    **row.cost,
                    "remarks": "; ".join(filter(None, [told.why, row.pair.says if row.pair else "", *row.group.marks])),
                    "command": row.group.command,
                }
            )
    return _csv(lines)


def runs_csv(report: Report) -> str:
    """A line for each run, whatever became of it, with all that it has measured."""
    return _csv([_run(report, run) for run in report.runs])


def _run(report: Report, run: Run) -> dict[str, Any]:
    at = group_of(report.groups, run)
    return {
        "run": run.name if run.path is None else str(run.path),
        "state": run.state,
        "group": None if at is None else report.groups[at].label,
        "seed": run.seed,
        "fold": run.fold,
        **{name: run.metrics.get(name) for name in available(report.runs)},
        **cost(run),
        "sentence": run.sentence,
        "command": run.command(),
    }


def _csv(lines: Sequence[dict[str, Any]]) -> str:
    return csv_text(list(lines[0]), [list(line.values()) for line in lines])
