"""Caveats of a report: different code, data or devices, missing metrics, and what a search chose."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from statistics import fmean
from typing import Any

from lathe.config.metric_names import data_keys, loss_keys, without_split
from lathe.config.override_parsing import key_of, value_of
from lathe.config.values import shown
from lathe.errors import UserError
from lathe.runs.run_status import STATES
from lathe.runs.rundir import RunDir
from lathe.verbs.report.factors import ABSENT, Differences, without_noise
from lathe.verbs.report.metrics import direction, selected_by
from lathe.verbs.runs.formatting import many, printable
from lathe.verbs.runs.reader import Run, finite

FRONT = 8  # trials that are listed by number


def counts(runs: Sequence[Run]) -> dict[str, int]:
    """Return the number of runs in each state."""
    found = Counter(run.state for run in runs)
    return {state: found[state] for state in STATES}


def left_out(runs: Sequence[Run], waiting: int) -> list[str]:
    """Return a line for each run that is not in the tables, with the reason."""
    lines = [
        f"{run.state}: {run.label}" + (f": {run.sentence}" if run.sentence else "")
        for run in runs
        if run.state != "complete"
    ]
    return lines + ([f"{many(waiting, 'job')} of the sweep {_have(waiting)} not begun"] if waiting else [])


def caveats(
    runs: Sequence[Run], differences: Differences, metrics: Sequence[str], comparisons: Mapping[str, int]
) -> Iterator[str]:
    """Yield a sentence for each reason why the runs are less comparable than they seem."""
    runs = [run for run in runs if run.state == "complete"]
    commits = Counter(map(_commit, (run.environment for run in runs if run.environment)))
    if len(commits) > 1:
        listed = ", ".join(f"{name}: {count}" for (name, _), count in commits.most_common(5))
        yield f"The runs are of {len(commits)} states of the code ({listed})."
    for package in ("lathe", "torch"):
        packages = (run.environment.get("packages") for run in runs)
        found = [one.get(package) for one in packages if isinstance(one, dict)]
        versions = Counter(printable(str(version)) for version in found if version)
        if len(versions) > 1:
            listed = ", ".join(f"{version}: {count}" for version, count in versions.most_common(5))
            yield f"The runs are of {len(versions)} versions of {package} ({listed})."
    if keys := data_keys(differences.keys):
        yield f"The runs are of different data ({', '.join(keys[:4])}): a difference may be theirs."
    losses = " and ".join(name for name in metrics if without_split(name) == "loss")
    if (keys := loss_keys(differences.keys)) and losses:
        yield (
            f"The runs' losses are different functions ({', '.join(keys[:4])}): {losses} of one is no measure of "
            "another's."
        )
    machines = {str(run.environment.get("cpu")) for run in runs if run.environment.get("cpu")}
    devices = sorted({shown(run.result.get("devices", ABSENT)) for run in runs})
    said = [f"{len(machines)} kinds of machines"] if len(machines) > 1 else []
    said += [f"{' and '.join(devices)} devices"] if len(devices) > 1 else []
    if said:
        yield f"The runs are of {' and of '.join(said)}: their seconds are no measure of each other."
    if len({str(run.fold) for run in runs}) > 1:
        yield "Folds share most of their training data: intervals over them are too narrow."
    complete = many(len(runs), "complete run")
    for metric in metrics:
        lacking = [run for run in runs if metric not in run.metrics]
        wild = sum(metric in run.result for run in lacking)
        if wild:
            yield f"{wild} of {complete} {_have(wild)} a {metric} that is not finite: it is not in the mean."
        if other := len(lacking) - wild:
            yield f"{other} of {complete} {_have(other)} no {metric}."
        if (count := comparisons[metric]) > 1:
            yield (
                f"p is of each of {count} comparisons of {metric} alone: one in twenty is below 0.05 where nothing "
                "differs. p (Holm) and p (BH) are corrected for that."
            )


def _commit(environment: Mapping[str, Any]) -> tuple[str, str]:
    """Return the commit as displayed, and the uncommitted diff, which distinguishes states of one commit."""
    commit, change = environment.get("git_commit"), str(environment.get("git_diff") or "")
    return printable(f"{str(commit)[:7] if commit else 'no commit'}{' and changes' if change else ''}"), change


def _have(count: int) -> str:
    return "has" if count == 1 else "have"


def search_options(runs: Sequence[Run]) -> dict[str, Any] | None:
    """Return `sweep` of the one search whose jobs all runs are; None otherwise."""
    folders = {run.sweep for run in runs}
    folder = folders.pop() if len(folders) == 1 else None
    with suppress(UserError, OSError):
        facts = None if folder is None else RunDir(folder).plain("sweep.yaml")
        options = facts.get("sweep") if isinstance(facts, dict) else None
        return options if isinstance(options, dict) and isinstance(options.get("space"), dict) else None
    return None


def search_note(runs: Sequence[Run], options: Mapping[str, Any], metric: str) -> str:
    """Describe the objectives of a search and what it chose; `metric` orders the rows."""
    listed = options.get("objectives")
    names = list(map(str, listed)) if isinstance(listed, list) else [selected_by(runs) or "objective"]
    asked = options.get("directions")
    asked = [asked] * len(names) if asked in ("max", "min") else asked
    asked = asked if isinstance(asked, list) and len(asked) == len(names) else [None] * len(names)
    ways = [direction(name, runs, way) for name, way in zip(names, asked, strict=True)]
    said = " and ".join(
        f"{printable(name)} ({'higher' if way == 'max' else 'lower'} is better)"
        for name, way in zip(names, ways, strict=True)
    )
    order, trials = f"rows are ordered by {metric}", _objectives(runs, len(names))
    signs = [1 if way == "max" else -1 for way in ways]
    best = _front({trial: [s * v for s, v in zip(signs, values, strict=True)] for trial, values in trials.items()})
    if not best:
        return f"A search by {said}, of which no trial is complete; {order}."
    if len(names) > 1:
        return f"A search by {said}: no trial beats {', '.join(map(str, best[:FRONT]))} in all of them; {order}."
    words = next(run.job.get("overrides") for run in runs if _trial(run) == best[0])
    drawn = " ".join(
        printable(f"{key_of(word)}={without_noise(value_of(word))}")
        for word in map(str, words or [])
        if key_of(word) in options["space"]
    )
    value = f"{trials[best[0]][0]:.4g}"
    return f"A search by {said}: of {len(trials)} complete trials it chose {best[0]}, {value}: {drawn}; {order}."


def _trial(run: Run) -> Any:
    """Return the number of a run's trial, which may have several runs."""
    own = run.job.get("trial")
    return run.number if own is None else own


def _objectives(runs: Sequence[Run], count: int) -> dict[Any, list[float]]:
    """Return the objectives of each complete trial, as means over its runs."""
    found: dict[Any, list[list[float]]] = {}
    for run in sorted(runs, key=lambda run: run.number or 0):
        listed = run.job.get("values")
        values = [value for value in map(finite, listed if isinstance(listed, list) else []) if value is not None]
        complete = run.job.get("state") == "complete" and len(values) == count
        found.setdefault(_trial(run), []).append(values if complete else [math.nan] * count)
    most = max(map(len, found.values()), default=0)
    whole = {trial: rows for trial, rows in found.items() if len(rows) == most and not math.isnan(sum(map(sum, rows)))}
    return {trial: [fmean(column) for column in zip(*rows, strict=True)] for trial, rows in whole.items()}


def _front(trials: Mapping[Any, Sequence[float]]) -> list[Any]:
    """Return the Pareto front of values to maximize; with one objective the first of the best."""

    def beats(a: Sequence[float], b: Sequence[float]) -> bool:
        return a != b and all(x >= y for x, y in zip(a, b, strict=True))

    best = [trial for trial, own in trials.items() if not any(beats(other, own) for other in trials.values())]
    return best[:1] if best and len(trials[best[0]]) == 1 else best
