"""Assemble a report from the runs, before anything is written."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from lathe.errors import did_you_mean, require
from lathe.verbs.report import metrics, notes
from lathe.verbs.report.factors import Differences, titles
from lathe.verbs.report.groups import Group, Pair, find_baseline, make_groups, make_pairs
from lathe.verbs.report.statistics import Interval
from lathe.verbs.runs.formatting import printable
from lathe.verbs.runs.reader import Run, find_runs

COLUMNS = (
    *("n", "mean", "interval", "best", "difference", "difference_interval", "p", "p_holm", "p_bh"),
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
        tested = {metric: sum(pair.told.p is not None for pair in pairs) for metric, pairs in self.pairs.items()}
        caveats = notes.caveats(self.runs, self.differences, self.metrics, tested)
        return [*self.notes, *([SINGLE] if self.single else []), *caveats]

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
    named, by, asked = (_list(request[key]) for key in ("runs", "by", "metric"))
    found = find_runs(named or [])
    runs = [run for run in found if run.path is not None or run.state != "waiting"]
    require(bool(runs), f"runs={named}: none of the {len(found)} jobs has begun.")
    check_tasks(runs, by)
    wanted = metrics.choose_metrics(runs, asked)
    differences = Differences([run for run in runs if run.leaves])
    groups = make_groups(runs, differences, by)
    directions = {metric: metrics.direction(metric, runs, request["direction"]) for metric in wanted}
    search = notes.search_options(runs)
    baseline = groups[find_baseline(groups, request["baseline"])]
    if search is not None or all(len(group.units) < 2 for group in groups):
        groups.sort(key=lambda group: _rank(group, wanted[0], directions[wanted[0]]))
    if search is not None and request["baseline"] is None:
        baseline = groups[0]
    guessed = metrics.doubts(runs, wanted, asked, request["direction"])
    return Report(
        title=", ".join(named or []),
        runs=runs,
        waiting=len(found) - len(runs),
        differences=differences,
        groups=groups,
        baseline=next(at for at, group in enumerate(groups) if group is baseline),
        metrics=wanted,
        directions=directions,
        how=Interval(request["interval"], request["confidence"], request["seed"]),
        notes=[*guessed, *([] if search is None else [notes.search_note(runs, search, wanted[0])])],
        search=search is not None,
        columns=_columns(_list(request["columns"]), list(groups[0].factors)),
    )


def check_tasks(runs: Sequence[Run], by: Sequence[str] | None) -> None:
    """Raise UserError if the runs have different tasks, unless `by` compares them."""
    tasks = Counter(str(run.leaves["task._target_"]) for run in runs if "task._target_" in run.leaves)
    listed = ", ".join(f"{name.rpartition('.')[2]} of {count}" for name, count in tasks.most_common())
    require(
        len(tasks) < 2 or not {"task", "task._target_"}.isdisjoint(by or ()),
        f"runs: these are of {len(tasks)} tasks ({printable(listed)}), whose metrics are no measure of each other: "
        "name runs of one, or compare them all the same with by=task._target_.",
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
