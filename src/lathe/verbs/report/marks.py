"""Caveats of a report: runs of different code, data or devices, and runs that are left out."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from lathe.config.schema import shown
from lathe.runs.metric_names import data_keys, loss_keys, without_split
from lathe.runs.run_status import STATES
from lathe.verbs.report.collect import Run, harmless
from lathe.verbs.report.factors import ABSENT, Differences, code
from lathe.verbs.runs.table import many


def counts(runs: Sequence[Run]) -> dict[str, int]:
    """Return the number of runs in each state."""
    found = Counter(run.state for run in runs)
    return {state: found[state] for state in STATES}


def left_out(runs: Sequence[Run], waiting: int) -> list[str]:
    """Return a line for each run that is not in the tables, with the reason."""
    lines = [
        f"{run.state}: {run.name}" + (f": {run.sentence}" if run.sentence else "")
        for run in runs
        if run.state != "complete"
    ]
    return lines + ([f"{many(waiting, 'job')} of the sweep {_have(waiting)} not begun"] if waiting else [])


def marks(runs: Sequence[Run], differences: Differences, metrics: Sequence[str], comparisons: int) -> list[str]:
    """Return a caveat for each reason why the runs are less comparable than they seem."""
    complete = [run for run in runs if run.state == "complete"]
    return [
        *_versions(complete),
        *_data(differences),
        *_losses(differences, metrics),
        *_devices(complete),
        *_folds(complete),
        *(line for metric in metrics for line in _without(complete, metric)),
        *_comparisons(comparisons),
    ]


def _versions(runs: Sequence[Run]) -> list[str]:
    code = Counter(_code(run.environment) for run in runs if run.environment)
    found = []
    if len(code) > 1:
        listed = ", ".join(f"{harmless(name)}: {count}" for (name, _), count in code.most_common(5))
        found.append(f"The runs are of {len(code)} states of the code ({listed}).")
    for package in ("lathe", "torch"):
        seen = Counter(str(_packages(run).get(package)) for run in runs if _packages(run).get(package))
        if len(seen) > 1:
            listed = ", ".join(f"{harmless(version)}: {count}" for version, count in seen.most_common(5))
            found.append(f"The runs are of {len(seen)} versions of {package} ({listed}).")
    return found


def _packages(run: Run) -> dict[str, Any]:
    there = run.environment.get("packages")
    return there if isinstance(there, dict) else {}


def _code(environment: dict[str, Any]) -> tuple[str, str]:
    """Return the commit as displayed, and the uncommitted diff, which distinguishes states of one commit."""
    commit, change = environment.get("git_commit"), str(environment.get("git_diff") or "")
    return f"{str(commit)[:7] if commit else 'no commit'}{' and changes' if change else ''}", change


def _data(differences: Differences) -> list[str]:
    keys = data_keys(differences.keys)
    return [f"The runs are of different data ({', '.join(keys[:4])}): a difference may be theirs."] if keys else []


def _losses(differences: Differences, metrics: Sequence[str]) -> list[str]:
    keys, losses = loss_keys(differences.keys), [name for name in metrics if without_split(name) == "loss"]
    if not keys or not losses:
        return []
    told = f"The runs' losses are different functions ({', '.join(keys[:4])})"
    return [f"{told}: {' and '.join(losses)} of one is no measure of another's."]


def _devices(runs: Sequence[Run]) -> list[str]:
    names = Counter(str(run.environment.get("cpu")) for run in runs if run.environment.get("cpu"))
    counted = Counter(shown(run.result.get("devices", ABSENT)) for run in runs)
    told = [f"{len(names)} kinds of machines"] if len(names) > 1 else []
    told += [f"{' and '.join(sorted(counted))} devices"] if len(counted) > 1 else []
    return [f"The runs are of {' and of '.join(told)}: their seconds are no measure of each other."] if told else []


def _folds(runs: Sequence[Run]) -> list[str]:
    several = len({str(run.fold) for run in runs}) > 1
    return ["Folds share most of their training data: intervals over them are too narrow."] if several else []


def _without(runs: Sequence[Run], metric: str) -> list[str]:
    lacking = [run for run in runs if metric not in run.metrics]
    wild = sum(metric in run.result for run in lacking)
    complete, other = many(len(runs), "complete run"), len(lacking) - wild
    found = [f"{wild} of {complete} {_have(wild)} a {metric} that is not finite: it is not in the mean."]
    found.append(f"{other} of {complete} {_have(other)} no {metric}.")
    return [sentence for sentence, count in zip(found, (wild, other), strict=True) if count]


def _have(count: int) -> str:
    return "has" if count == 1 else "have"


def _comparisons(count: int) -> list[str]:
    if count < 2:
        return []
    return [f"p is of each of {count} comparisons alone: one in twenty is below 0.05 where nothing differs."]


def against(run: Run, usual: dict[str, Any]) -> dict[str, Any]:
    """Return the keys in which a run differs from the most common configuration, with its values."""
    return {
        key: run.leaves.get(key, ABSENT)
        for key, value in usual.items()
        if code(run.leaves.get(key, ABSENT)) != code(value)
    }
