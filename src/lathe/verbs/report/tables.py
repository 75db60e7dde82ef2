"""The tables of a report, independent of the file format."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from lathe.files import csv_text
from lathe.verbs.report.assemble import COLUMNS, Report
from lathe.verbs.report.collect import Run
from lathe.verbs.report.cost import cost, mean_cost
from lathe.verbs.report.factors import titles
from lathe.verbs.report.groups import Group, Pair, group_of
from lathe.verbs.report.metrics import available
from lathe.verbs.report.statistics import Summary

ALONE = "n = 1: no interval"  # for single runs reported once
DIFFERENCES = {"difference": "difference", "difference_interval": "its interval", "p": "p"}
TITLES = {"bytes": "bytes", "macs": "MACs", "latency_ms": "latency (ms)"}


@dataclass(frozen=True)
class Row:
    """A group under one metric; `pair` is None for the baseline."""

    group: Group
    told: Summary
    best: float | None
    pair: Pair | None
    cost: dict[str, float | None]


def rows(report: Report, metric: str) -> list[Row]:
    """Return a row for each listed group, in order."""
    pairs = {pair.a: pair for pair in report.pairs[metric]}
    return [
        Row(
            group,
            group.summary(metric, report.how),
            group.best(metric, report.directions[metric]),
            pairs.get(at),
            mean_cost(group),
        )
        for at, group in enumerate(report.listed)
    ]


def number(value: float | None) -> str:
    """Format a number with four decimals, fewer if it is large."""
    if value is None:
        return ""
    if float(value).is_integer() and abs(value) < 1e15:
        return f"{value:,.0f}"
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4f}" if abs(value) >= 1e-3 else f"{value:.3g}"


def span(interval: Sequence[float] | None) -> str:
    """Format an interval."""
    return "" if interval is None else f"[{number(interval[0])}, {number(interval[1])}]"


@dataclass(frozen=True)
class Column:
    """A column of a metric's table, with a cell for each row; `name` is its name in the key `columns`."""

    name: str
    title: str
    cells: list[str]
    number: bool = True


def columns(report: Report, metric: str) -> list[Column]:
    """Return the requested columns in that order; by default all that are informative."""
    there = _columns(report, metric)
    if report.columns is None:
        return [column for column in there if not column.number or (any(column.cells) and not _idle(report, column))]
    named = {column.name: column for column in there} | dict(zip(titles(report.factors), there, strict=False))
    return [named[name] for name in report.columns]


def _idle(report: Report, column: Column) -> bool:
    """Return whether a column is redundant: the best of single runs, or steps that are all equal."""
    return report.single if column.name == "best" else column.name == "steps" and len(set(column.cells)) == 1


def _columns(report: Report, metric: str) -> list[Column]:
    told = rows(report, metric)
    title = dict(zip(report.factors, titles(report.factors), strict=True))
    differences = [_difference(row) if len(told) > 1 else ["", "", ""] for row in told]
    found = [Column(key, title[key], [row.group.texts[key] for row in told], False) for key in report.factors]
    found += [
        Column("n", "n", [str(row.told.n) for row in told]),
        Column("mean", "mean ± std", [_mean(row.told) for row in told]),
        Column("interval", f"{report.how.percent} interval", [span(row.told.interval) for row in told]),
        Column("best", "best", [number(row.best) for row in told]),
        *(
            Column(name, title, [cells[at] for cells in differences])
            for at, (name, title) in enumerate(DIFFERENCES.items())
        ),
        Column("steps", "steps", [number(row.group.steps) for row in told]),
        Column("seconds", "seconds", [three_digits(row.group.mean_of("seconds")) for row in told]),
        Column("parameters", "parameters", [number(row.group.mean_of("parameters")) for row in told]),
    ]
    return found + [
        Column(
            name,
            title,
            [three_digits(row.cost[name]) if name == "latency_ms" else number(row.cost[name]) for row in told],
        )
        for name, title in TITLES.items()
    ]


def three_digits(value: float | None) -> str:
    """Format a time with three digits."""
    return "" if value is None else f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _mean(told: Summary) -> str:
    return number(told.mean) + ("" if told.std is None else f" ± {number(told.std)}")


def _difference(row: Row) -> list[str]:
    if row.pair is None:
        return ["baseline", "", ""]
    told = row.pair.told
    sign = "+" if told.difference is not None and told.difference > 0 else ""
    return [sign + number(told.difference), span(told.interval), "" if told.p is None else f"{told.p:.2g}"]


def remarks(report: Report, metric: str, kept: Sequence[int] | None = None) -> Iterator[str]:
    """Yield a line for each row, or those `kept`: its missing interval, its difference and its caveats."""
    told = rows(report, metric)
    for row in told if kept is None else [told[at] for at in kept]:
        said = [row.told.why or "", row.pair.says if row.pair else "", *row.group.marks]
        said = [one for one in dict.fromkeys(said) if one and not (report.single and one == ALONE)]
        if said:
            yield f"{row.group.label}: {'; '.join(said)}"


def groups_csv(report: Report) -> str:
    """Return a CSV line for each metric and group, with unrounded numbers."""
    lines = [_group(report, metric, row) for metric in report.metrics for row in rows(report, metric)]
    return _csv(lines)


def _group(report: Report, metric: str, row: Row) -> dict[str, Any]:
    told, pair = row.told, row.pair.told if row.pair else None
    low, high = told.interval or (None, None)
    below, above = (pair.interval if pair else None) or (None, None)
    parts: dict[str, dict[str, Any]] = {
        **{key: {key: text} for key, text in row.group.texts.items()},
        "n": {"n": told.n},
        "mean": {"mean": told.mean, "std": told.std},
        "interval": {"low": low, "high": high},
        "best": {"best": row.best},
        "difference": {"pairs": pair.n if pair else None, "difference": pair.difference if pair else None},
        "difference_interval": {"difference_low": below, "difference_high": above},
        "p": {"p": pair.p if pair else None},
        "steps": {"steps": row.group.steps},
        **{name: {name: row.group.mean_of(name)} for name in ("seconds", "parameters")},
        **{name: {name: value} for name, value in row.cost.items()},
    }
    parts |= {name: parts[key] for name, key in zip(titles(report.factors), report.factors, strict=True)}
    kept = report.columns or [name for name in parts if name in report.factors or name in COLUMNS]
    return {
        "metric": metric,
        "better": report.directions[metric],
        **{name: value for one in kept for name, value in parts[one].items()},
        "remarks": "; ".join(filter(None, [told.why, row.pair.says if row.pair else "", *row.group.marks])),
        "command": row.group.command,
    }


def runs_csv(report: Report) -> str:
    """Return a CSV line for each run in any state, with all its metrics."""
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
