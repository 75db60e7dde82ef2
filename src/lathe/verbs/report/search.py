"""Describe a search in the report of its runs: its objectives and the best trial."""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from typing import Any

from lathe.config.override_parsing import key_of
from lathe.errors import UserError
from lathe.runs.rundir import RunDir
from lathe.verbs.report.collect import Run, finite, harmless
from lathe.verbs.report.factors import without_noise
from lathe.verbs.report.metrics import chosen_by, direction

FRONT = 8  # trials that are listed by number


def options_of(runs: Sequence[Run]) -> dict[str, Any] | None:
    """Return `sweep` of the one search whose jobs all runs are; None otherwise."""
    folders = {run.sweep for run in runs}
    folder = folders.pop() if len(folders) == 1 else None
    options = None if folder is None else _facts(folder).get("sweep")
    return options if isinstance(options, dict) and isinstance(options.get("space"), dict) else None


def _facts(folder: Path) -> dict[str, Any]:
    with suppress(UserError, OSError):
        facts = RunDir(folder).plain("sweep.yaml")
        return facts if isinstance(facts, dict) else {}
    return {}


def tell(runs: Sequence[Run], options: Mapping[str, Any], metric: str) -> str:
    """Describe a search: objectives, best trial or Pareto front, and `metric`, the order of the rows."""
    names = _names(runs, options)
    ways = _ways(names, runs, options.get("directions"))
    trials = _reached(runs, len(names))
    by = " and ".join(f"{name} ({'higher' if way == 'max' else 'lower'} is better)" for name, way in ways.items())
    signs = [1 if way == "max" else -1 for way in ways.values()]
    best = _front({number: [s * v for s, v in zip(signs, values, strict=True)] for number, values in trials.items()})
    order = f"rows are ordered by {metric}"
    if not best:
        return f"A search by {by}, of which no trial is complete; {order}."
    if len(names) > 1:
        return f"A search by {by}: no trial beats {', '.join(map(str, best[:FRONT]))} in all of them; {order}."
    drawn = " ".join(_drawn(runs, options["space"], best[0]))
    value = f"{trials[best[0]][0]:.4g}"
    return f"A search by {by}: of {len(trials)} complete trials it chose {best[0]}, {value}: {drawn}; {order}."


def _names(runs: Sequence[Run], options: Mapping[str, Any]) -> list[str]:
    names = options.get("objectives")
    return [harmless(str(name)) for name in names] if isinstance(names, list) else [chosen_by(runs) or "objective"]


def _ways(names: Sequence[str], runs: Sequence[Run], asked: Any) -> dict[str, str]:
    if asked in ("max", "min"):
        return dict.fromkeys(names, str(asked))
    listed = asked if isinstance(asked, list) and len(asked) == len(names) else [None] * len(names)
    return {name: direction(name, runs, way) for name, way in zip(names, listed, strict=True)}


def _trial(run: Run) -> Any:
    own = run.told.get("trial")
    return run.job if own is None else own


def _reached(runs: Sequence[Run], count: int) -> dict[Any, list[float]]:
    """Return the objectives of each complete trial, as means over its runs."""
    found: dict[Any, list[list[float]]] = {}
    for run in sorted(runs, key=lambda run: run.job or 0):
        told = run.told.get("values")
        values = [finite(value) for value in told] if isinstance(told, list) else []
        known = [value for value in values if value is not None]
        complete = run.told.get("state") == "complete" and len(known) == count
        found.setdefault(_trial(run), []).append(known if complete else [math.nan] * count)
    most = max(map(len, found.values()), default=0)
    means = {number: list(map(fmean, zip(*rows, strict=True))) for number, rows in found.items() if len(rows) == most}
    return {number: values for number, values in means.items() if not any(map(math.isnan, values))}


def _front(trials: Mapping[Any, Sequence[float]]) -> list[Any]:
    """Return the Pareto front of values to maximize; with one objective the first of the best."""
    better = [
        number
        for number, own in trials.items()
        if not any(
            list(other) != list(own) and all(a >= b for a, b in zip(other, own, strict=True))
            for other in trials.values()
        )
    ]
    return better[:1] if better and len(trials[better[0]]) == 1 else better


def _drawn(runs: Sequence[Run], space: Mapping[str, Any], number: Any) -> list[str]:
    words = next(run.told.get("overrides") for run in runs if _trial(run) == number)
    pairs = [harmless(str(word)).partition("=") for word in words or [] if key_of(str(word)) in space]
    return [f"{key}={without_noise(value)}" for key, _, value in pairs]
