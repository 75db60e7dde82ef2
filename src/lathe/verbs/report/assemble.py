"""A whole report as objects: collected, grouped and compared, before anything is written."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from lathe.verbs.report import marks, metrics
from lathe.verbs.report.collect import Run, check_tasks, collect
from lathe.verbs.report.factors import Differences
from lathe.verbs.report.groups import Group, Pair, find_baseline, make_groups, make_pairs
from lathe.verbs.report.statistics import Interval


@dataclass(frozen=True)
class Report:
    """What a report says. `metrics` are those that it is about, the first of them foremost, and `directions` says for
    each whether max or min is better, `doubts` which of both nobody has chosen; `waiting` counts a sweep's jobs that
    have not begun."""

    title: str
    runs: list[Run]
    waiting: int
    differences: Differences
    groups: list[Group]
    baseline: int
    metrics: list[str]
    directions: dict[str, str]
    how: Interval
    doubts: list[str]

    @cached_property
    def pairs(self) -> dict[str, list[Pair]]:
        """The differences from the baseline, by metric."""
        return {
            metric: make_pairs(self.groups, self.baseline, metric, self.directions[metric], self.how)
            for metric in self.metrics
        }

    @property
    def factors(self) -> list[str]:
        """The keys that tell groups apart."""
        return list(self.groups[0].factors)

    @cached_property
    def marks(self) -> list[str]:
        """What makes runs less comparable than they look."""
        comparisons = sum(pair.told.p is not None for pairs in self.pairs.values() for pair in pairs)
        return [*self.doubts, *marks.marks(self.runs, self.differences, self.metrics, comparisons)]


def assemble(request: Mapping[str, Any]) -> Report:
    """The report that the keys of configs/report.yaml ask for.

    Raises:
        UserError: a key names what is not there.
    """
    named, by = _list(request["runs"]) or [], _list(request["by"])
    runs, waiting = collect(named)
    check_tasks(runs, by)
    asked = _list(request["metric"])
    wanted = metrics.chosen(runs, asked)
    differences = Differences([run for run in runs if run.leaves])
    groups = make_groups(runs, differences, by)
    return Report(
        title=", ".join(named),
        runs=runs,
        waiting=waiting,
        differences=differences,
        groups=groups,
        baseline=find_baseline(groups, request["baseline"]),
        metrics=wanted,
        directions={metric: metrics.direction(metric, runs, request["direction"]) for metric in wanted},
        how=Interval(request["interval"], request["confidence"], request["seed"]),
        doubts=list(metrics.doubts(runs, wanted, asked, request["direction"])),
    )


def _list(value: Any) -> list[str] | None:
    return [value] if isinstance(value, str) else value
