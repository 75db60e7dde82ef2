"""Assemble a report from the runs: its metrics and their directions, groups, differences and caveats."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean
from typing import Any

from lathe.config.metric_names import (
    data_keys,
    is_cost,
    loss_keys,
    lower_is_better,
    on_test,
    recorded_direction,
    split_of,
    without_split,
)
from lathe.config.override_parsing import key_of, value_of
from lathe.config.values import shown
from lathe.errors import UserError, did_you_mean, require
from lathe.runs.run_discovery import STATES
from lathe.runs.rundir import RunDir
from lathe.verbs.report.groups import (
    ABSENT,
    Differences,
    Group,
    Interval,
    Pair,
    find_baseline,
    make_groups,
    make_pairs,
    titles,
    without_noise,
)
from lathe.verbs.runs.other_tools import find_all_runs
from lathe.verbs.runs.reader import Run, finite, many, printable

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
        return list(self.groups[0].factors)

    @cached_property
    def marks(self) -> list[str]:
        """Caveats: reasons why the runs are less comparable than they seem."""
        tested = {metric: sum(pair.test.p is not None for pair in pairs) for metric, pairs in self.pairs.items()}
        caveats = _caveats(self.runs, self.differences, self.metrics, tested)
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
    patterns, by, requested = (_list(request[key]) for key in ("runs", "by", "metric"))
    all_runs = find_all_runs(patterns or [])
    runs = [run for run in all_runs if run.path is not None or run.state != "waiting"]
    require(bool(runs), f"runs={patterns}: none of the {len(all_runs)} jobs has begun.")
    check_tasks(runs, by)
    metrics = _choose_metrics(runs, requested)
    differences = Differences([run for run in runs if run.leaves])
    groups = make_groups(runs, differences, by)
    directions = {metric: direction_of(metric, runs, request["direction"]) for metric in metrics}
    search = _search_options(runs)
    baseline = groups[find_baseline(groups, request["baseline"])]
    if search is not None or all(len(group.units) < 2 for group in groups):
        sign = -1 if directions[metrics[0]] == "max" else 1  # best mean first, then no metric, then no complete run
        means = {id(group): group.mean_of(metrics[0]) for group in groups}
        groups.sort(key=lambda group: (not group.units, means[id(group)] is None, sign * (means[id(group)] or 0.0)))
    if search is not None and request["baseline"] is None:
        baseline = groups[0]
    columns, names = _list(request["columns"]), [*groups[0].factors, *COLUMNS]
    for name in columns or ():
        hint = did_you_mean(name, names, f"there are {', '.join(names)}.")
        require(name in [*names, *titles([*groups[0].factors])], f"columns=[{name}]: no table has this column; {hint}")
    notes = list(_guesses(runs, metrics, requested, request["direction"]))
    return Report(
        title=", ".join(patterns or []),
        runs=runs,
        waiting=len(all_runs) - len(runs),
        differences=differences,
        groups=groups,
        baseline=next(index for index, group in enumerate(groups) if group is baseline),
        metrics=metrics,
        directions=directions,
        how=Interval(request["interval"], request["confidence"], request["seed"]),
        notes=notes if search is None else [*notes, _search_note(runs, search, metrics[0])],
        search=search is not None,
        columns=columns,
    )


def check_tasks(runs: Sequence[Run], by: Sequence[str] | None) -> None:
    """Raise UserError if the runs have different tasks, unless `by` compares them."""
    tasks = Counter(str(run.leaves["task._target_"]) for run in runs if "task._target_" in run.leaves)
    listed = ", ".join(f"{name.rpartition('.')[2]} of {count}" for name, count in tasks.most_common())
    require(
        len(tasks) < 2 or not {"task", "task._target_"}.isdisjoint(by or ()),
        f"runs: these are of {len(tasks)} tasks ({printable(listed)}). Name runs of one, or add by=task._target_.",
    )


def _list(value: Any) -> list[str] | None:
    return [value] if isinstance(value, str) else value


# metrics and their directions

ORDER = ("test", "val", "objective", None, "train", "cost")


def available(runs: Sequence[Run]) -> list[str]:
    """Return the metrics that any run has: test, val, objective, others, train, and cost last."""
    names = {name for run in runs if run.leaves for name in run.metrics}  # unreadable runs are in no table
    kinds = {name: "cost" if is_cost(name) else name if name == "objective" else split_of(name) for name in names}
    return sorted(names, key=lambda name: (ORDER.index(kinds[name]), name))


def _choose_metrics(runs: Sequence[Run], requested: Sequence[str] | None) -> list[str]:
    """Return the requested metrics, or the one that selected the best checkpoints, on test if available."""
    names = available(runs)
    if not names:
        states = ", ".join(f"{count} {state}" for state, count in Counter(run.state for run in runs).items())
        sentences = dict.fromkeys(run.sentence for run in runs if run.sentence)
        raise UserError(f"runs: none has a metric yet ({states}). {' '.join(list(sentences)[:5])}".strip())
    for name in requested or ():
        if name not in names:
            hint = did_you_mean(name, names, f"they have {', '.join(names[:10])}.")
            raise UserError(f"metric={name}: no run has measured it; {hint}")
    return list(dict.fromkeys(requested or [next((name for name in _selecting(runs) if name in names), names[0])]))


def _selected_by(runs: Sequence[Run]) -> str | None:
    """Return the metric that selected the best checkpoint of most runs, or that a sweep optimized."""
    names = (run.leaves.get("objective") or run.result.get("monitor") for run in runs if run.metrics)
    return _commonest(name for name in names if isinstance(name, str))


def _commonest(values: Iterable[str]) -> str | None:
    return next((value for value, _ in Counter(values).most_common(1)), None)


def direction_of(name: str, runs: Sequence[Run], direction: str | None) -> str:
    """Return max or min: as requested, as recorded by the runs, or guessed from the name."""
    return direction or _recorded(name, runs) or ("min" if lower_is_better(_meant(name, runs)) else "max")


def _guesses(
    runs: Sequence[Run], metrics: Sequence[str], requested: Sequence[str] | None, direction: str | None
) -> Iterator[str]:
    """Yield a note for each metric or direction that was guessed."""
    if not requested and metrics[0] not in _selecting(runs):
        name = _selected_by(runs)
        named = "" if name is None else f" ({name})"
        others = ", ".join([other for other in available(runs) if other != metrics[0]][:5])
        hint = f"; metric= takes another ({others})" if others else ""
        yield f"No result has the metric that chose the best checkpoints{named}: the tables are of {metrics[0]}{hint}."
    for name in metrics if direction is None else ():
        guess = direction_of(name, runs, None)
        more, opposite = ("higher", "min") if guess == "max" else ("lower", "max")
        if _recorded(name, runs) is None:
            yield f"That {more} {name} is better was guessed from its name: direction={opposite} reverses it."


def _selecting(runs: Sequence[Run]) -> list[str]:
    name = _selected_by(runs)
    return [] if name is None else [on_test(name), name, "objective"]


def _meant(name: str, runs: Sequence[Run]) -> str:
    return (_selected_by(runs) or name) if name == "objective" else name


def _recorded(name: str, runs: Sequence[Run]) -> str | None:
    """Return the direction that most runs recorded; that of a cost is known."""
    if is_cost(name):
        return "min" if lower_is_better(name) else "max"
    monitor = _meant(name, runs)
    return _commonest(filter(None, (recorded_direction(run.result, monitor) for run in runs)))


# what makes runs less comparable, and what a search chose

FRONT = 8  # trials that are listed by number


def counts(runs: Sequence[Run]) -> dict[str, int]:
    tally = Counter(run.state for run in runs)
    return {state: tally[state] for state in STATES}


def left_out(runs: Sequence[Run], waiting: int) -> list[str]:
    """Return a line for each run that is not in the tables, with the reason."""
    lines = [": ".join(filter(None, (run.state, run.label, run.sentence))) for run in runs if run.state != "complete"]
    return lines + ([f"waiting: {many(waiting, 'job')} of the sweep"] if waiting else [])


def _caveats(
    runs: Sequence[Run], differences: Differences, metrics: Sequence[str], comparisons: Mapping[str, int]
) -> Iterator[str]:
    """Yield a sentence for each reason why the runs are less comparable than they seem."""
    runs = [run for run in runs if run.state == "complete"]
    commits = Counter[tuple[str, str]]()  # with the uncommitted diff, which distinguishes states of one commit
    for run in runs:
        if run.environment:
            commit, change = run.environment.get("git_commit"), str(run.environment.get("git_diff") or "")
            name = f"{str(commit)[:7] if commit else 'no commit'}{' and changes' if change else ''}"
            commits[printable(name), change] += 1
    kinds: dict[str, list[tuple[str, int]]] = {
        "states of the code": [(name, count) for (name, _), count in commits.most_common()]
    }
    for package in ("lathe", "torch"):
        packages = [run.environment.get("packages") for run in runs]
        versions = [installed.get(package) for installed in packages if isinstance(installed, dict)]
        kinds[f"versions of {package}"] = Counter(printable(str(name)) for name in versions if name).most_common()
    for kind, tally in kinds.items():
        if len(tally) > 1:
            listed = ", ".join(f"{name}: {count}" for name, count in tally[:5])
            yield f"The runs are of {len(tally)} {kind} ({listed})."
    if keys := data_keys(differences.keys):
        yield f"The runs are of different data ({', '.join(keys[:4])}): a difference may be theirs."
    losses = " and ".join(name for name in metrics if without_split(name) == "loss")
    if (keys := loss_keys(differences.keys)) and losses:
        yield f"The runs' losses are different functions ({', '.join(keys[:4])}): {losses} can't be compared."
    machines = {str(run.environment.get("cpu")) for run in runs if run.environment.get("cpu")}
    devices = sorted({shown(run.result.get("devices", ABSENT)) for run in runs})
    hardware = [f"{len(machines)} kinds of machines"] if len(machines) > 1 else []
    hardware += [f"{' and '.join(devices)} devices"] if len(devices) > 1 else []
    if hardware:
        yield f"The runs are of {' and of '.join(hardware)}: their seconds can't be compared."
    if len({str(run.fold) for run in runs}) > 1:
        yield "Folds share most of their training data: intervals over them are too narrow."
    complete = many(len(runs), "complete run")
    for metric in metrics:
        missing = [run for run in runs if metric not in run.metrics]
        infinite = sum(metric in run.result for run in missing)
        if infinite:
            yield f"{metric} is not finite in {infinite} of {complete}, which are not in the mean."
        if len(missing) > infinite:
            yield f"{metric} is missing in {len(missing) - infinite} of {complete}."
        if (count := comparisons[metric]) > 1:
            yield f"p is not corrected for the {count} comparisons of {metric}; p (Holm) and p (BH) are."


def _search_options(runs: Sequence[Run]) -> dict[str, Any] | None:
    """Return the options of the search that all runs are jobs of, if there is one."""
    sweeps = {run.file and run.file.parent.parent for run in runs}
    sweep = sweeps.pop()
    if sweeps or sweep is None:
        return None
    with suppress(UserError, OSError, TypeError, KeyError):  # damaged or another tool's
        options = RunDir(sweep).plain("sweep.yaml")["sweep"]
        return dict(options) if isinstance(options["space"], dict) else None
    return None


def _search_note(runs: Sequence[Run], options: Mapping[str, Any], metric: str) -> str:
    """Describe the objectives of a search and what it chose; `metric` orders the rows."""
    recorded = options.get("objectives")
    names = list(map(str, recorded)) if isinstance(recorded, list) else [_selected_by(runs) or "objective"]
    ways = options.get("directions")
    ways = ways if isinstance(ways, list) else [ways if ways in ("max", "min") else None] * len(names)
    directions = [direction_of(name, runs, direction) for name, direction in zip(names, ways, strict=True)]
    objectives = " and ".join(
        f"{printable(name)} ({'higher' if direction == 'max' else 'lower'} is better)"
        for name, direction in zip(names, directions, strict=True)
    )
    order, trials = f"rows are ordered by {metric}", _objectives(runs, len(names))
    signs = [1 if direction == "max" else -1 for direction in directions]
    signed = {trial: [s * v for s, v in zip(signs, values, strict=True)] for trial, values in trials.items()}

    def is_beaten(values: Sequence[float]) -> bool:
        return any(a != values and all(x >= y for x, y in zip(a, values, strict=True)) for a in signed.values())

    best = [trial for trial, values in signed.items() if not is_beaten(values)]  # the Pareto front
    if not best:
        return f"A search by {objectives}, without a complete trial; {order}."
    if len(names) > 1:
        return f"A search by {objectives}: no trial beats {', '.join(map(str, best[:FRONT]))} in all of them; {order}."
    overrides = next(run.job.get("overrides") for run in runs if _trial(run) == best[0])
    drawn = " ".join(
        printable(f"{key_of(word)}={without_noise(value_of(word))}")
        for word in map(str, overrides or [])
        if key_of(word) in options["space"]
    )
    value = f"{trials[best[0]][0]:.4g}"
    return f"A search by {objectives}: of {len(trials)} complete trials it chose {best[0]}, {value}: {drawn}; {order}."


def _trial(run: Run) -> Any:
    """Return the number of a run's trial, which may have several runs."""
    own = run.job.get("trial")
    return run.number if own is None else own


def _objectives(runs: Sequence[Run], count: int) -> dict[Any, list[float]]:
    """Return the objectives of each complete trial, as means over its runs."""
    rows_of: dict[Any, list[list[float]]] = {}
    for run in sorted(runs, key=lambda run: run.number or 0):
        recorded = run.job.get("values")
        values = [value for value in map(finite, recorded if isinstance(recorded, list) else []) if value is not None]
        is_complete = run.job.get("state") == "complete" and len(values) == count
        rows_of.setdefault(_trial(run), []).append(values if is_complete else [math.nan] * count)
    repeats = max(map(len, rows_of.values()), default=0)
    means = {
        trial: [fmean(column) for column in zip(*rows, strict=True)]
        for trial, rows in rows_of.items()
        if len(rows) == repeats
    }
    return {trial: values for trial, values in means.items() if not math.isnan(sum(values))}
