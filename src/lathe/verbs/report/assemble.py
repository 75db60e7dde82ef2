"""Assemble a report from collected, grouped and compared runs, before anything is written."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from lathe.errors import did_you_mean, require
from lathe.verbs.report import marks, metrics, search
from lathe.verbs.report.collect import Run, check_tasks, collect
from lathe.verbs.report.factors import Differences, titles
from lathe.verbs.report.groups import Group, Pair, find_baseline, make_groups, make_pairs
from lathe.verbs.report.statistics import Interval

COLUMNS = (
    *("n", "mean", "interval", "best", "difference", "difference_interval", "p"),
    *("steps", "seconds", "parameters", "bytes", "macs", "latency_ms"),
)
SINGLE = "Each row is one run, so nothing here is evidence of a difference: add -m and seed=1,2,3 to a row's command."


@dataclass(frozen=True)
class Report:
    """The contents of a report.

    `metrics` has the main one first; `directions` is max or min for each. `notes` name those of both that were guessed,
    and the result of a search. `waiting` counts the jobs that have not begun. Groups of a `search`, and of single runs,
    are ordered by the first metric.
    """

    title: str
    runs: list[Run]
    waiting: int
    differences: Differences
    groups: list[Group]
    baseline: int
    metrics: list[str]
    directions: dict[str, str]
    how: Interval
    notes: list[str]
    search: bool
    columns: list[str] | None

    @cached_property
    def pairs(self) -> dict[str, list[Pair]]:
        """The differences from the baseline, by metric."""
        return {
            metric: make_pairs(self.groups, self.baseline, metric, self.directions[metric], self.how)
            for metric in self.metrics
        }

    @property
    def factors(self) -> list[str]:
        """The keys that distinguish the groups."""
        return list(self.groups[0].factors)

    @cached_property
    def marks(self) -> list[str]:
        """Caveats: reasons why the runs are less comparable than they seem."""
        single = [SINGLE] if self.single else []
        comparisons = sum(pair.told.p is not None for pairs in self.pairs.values() for pair in pairs)
        return [*self.notes, *single, *marks.marks(self.runs, self.differences, self.metrics, comparisons)]

    @cached_property
    def single(self) -> bool:
        """True if there are several groups, and none has two complete runs."""
        return len(self.groups) > 1 and all(len(group.units) < 2 for group in self.groups)

    @cached_property
    def listed(self) -> list[Group]:
        """The groups with a row in the tables; for single runs and a search only those with a complete run."""
        complete = [group for group in self.groups if group.units]
        return complete if complete and (self.single or self.search) else self.groups


def assemble(request: Mapping[str, Any]) -> Report:
    """Build the report that the keys of configs/report.yaml request."""
    named, by = _list(request["runs"]) or [], _list(request["by"])
    runs, waiting = collect(named)
    check_tasks(runs, by)
    asked = _list(request["metric"])
    wanted = metrics.chosen(runs, asked)
    differences = Differences([run for run in runs if run.leaves])
    groups = make_groups(runs, differences, by)
    directions = {metric: metrics.direction(metric, runs, request["direction"]) for metric in wanted}
    options = search.options_of(runs)
    baseline = groups[find_baseline(groups, request["baseline"])]
    if options is not None or all(len(group.units) < 2 for group in groups):
        groups.sort(key=lambda group: _rank(group, wanted[0], directions[wanted[0]]))
    if options is not None and request["baseline"] is None:
        baseline = groups[0]
    notes = [*metrics.doubts(runs, wanted, asked, request["direction"])]
    notes += [] if options is None else [search.tell(runs, options, wanted[0])]
    return Report(
        title=", ".join(named),
        runs=runs,
        waiting=waiting,
        differences=differences,
        groups=groups,
        baseline=next(at for at, group in enumerate(groups) if group is baseline),
        metrics=wanted,
        directions=directions,
        how=Interval(request["interval"], request["confidence"], request["seed"]),
        notes=notes,
        search=options is not None,
        columns=_columns(_list(request["columns"]), list(groups[0].factors)),
    )


def _columns(asked: list[str] | None, factors: list[str]) -> list[str] | None:
    for name in asked or ():
        known = [*factors, *COLUMNS]
        hint = did_you_mean(name, known, f"there are {', '.join(known)}.")
        require(name in known or name in titles(factors), f"columns=[{name}]: no table has this column; {hint}")
    return asked


def _rank(group: Group, metric: str, direction: str) -> tuple[bool, bool, float]:
    """Return a sort key: best mean first, then no metric, then no complete run."""
    mean = group.mean_of(metric)
    return not group.units, mean is None, (mean or 0.0) * (-1 if direction == "max" else 1)


def _list(value: Any) -> list[str] | None:
    return [value] if isinstance(value, str) else value
