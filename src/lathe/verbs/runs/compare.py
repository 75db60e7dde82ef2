"""Compare two runs: configuration, environment, metrics and curves."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lathe.config.metric_names import is_curve, loss_keys
from lathe.config.resolve import flatten
from lathe.errors import require
from lathe.runs.rundir import open_run
from lathe.verbs.runs.formatting import printable, table_lines
from lathe.verbs.runs.reader import differing_environments, is_number, read_curves

NOT_SHOWN = ("paths", "launch", "hydra", "resume", "trusted")
LOSSES = tuple(f"{split}{mark}loss" for split in ("train", "val", "test") for mark in "/_")


def compare(words: Sequence[str], columns: Sequence[str] | None, points: int) -> dict[str, Any]:
    """Return the differences between two runs.

    `typed` has the overrides of only one of them, `curves` each metric at `points` of their common steps, and `apart`
    the metrics that measure different things, with the reason. `columns` are the metrics to compare; None: all.
    """
    runs = [open_run(word, "compare", look=True) for word in words]
    require(runs[0].path != runs[1].path, f"compare=[{words[0]},{words[1]}]: both are {runs[0].path}; give two runs.")
    a, b = (flatten(run.plain("config.yaml")) for run in runs)
    pairs = {key: (a.get(key, "absent"), b.get(key, "absent")) for key in sorted(a | b)}
    configuration = {
        key: pair for key, pair in pairs.items() if pair[0] != pair[1] and key.split(".")[0] not in NOT_SHOWN
    }
    typed = [run.overrides if (run.path / "overrides.yaml").is_file() else [] for run in runs]
    mine, theirs = (run.result if run.complete else {} for run in runs)
    metrics = {key: (mine.get(key), theirs.get(key)) for key in sorted(mine | theirs)}
    metrics = {key: pair for key, pair in metrics.items() if any(map(is_number, pair))}
    curves = common_points(runs[0].path, runs[1].path, points)
    for key in columns or ():
        known = [*metrics, *curves]
        require(key in known, f"columns=[{key}]: neither run has such a metric; they have {', '.join(known[:30])}.")
    apart: dict[str, str] = {}
    if mine and theirs and mine.get("monitor") != theirs.get("monitor"):
        apart["objective"] = f"{mine.get('monitor')} and {theirs.get('monitor')}"
    if keys := loss_keys(configuration):
        apart |= dict.fromkeys(LOSSES, f"different {', '.join(keys)}")
    return {
        "runs": [str(run.path) for run in runs],
        "typed": [[word for word in own if not all(word in other for other in typed)] for own in typed],
        "complete": [run.complete for run in runs],
        "configuration": configuration,
        "environment": differing_environments(*(run.environment for run in runs)),
        "metrics": {key: pair for key, pair in metrics.items() if columns is None or key in columns},
        "apart": {key: why for key, why in apart.items() if key in metrics or key in curves},
        "curves": {key: rows for key, rows in curves.items() if columns is None or key in columns},
    }


def common_points(a: Path, b: Path, points: int) -> dict[str, list[tuple[int, float, float]]]:
    """Return (step, value, value) of each metric that two runs have logged, at up to `points` of the common steps."""
    mine, theirs = (
        {name: dict(zip(*curve, strict=True)) for name, curve in read_curves(path / "metrics.csv", _metrics).items()}
        for path in (a, b)
    )
    found = {}
    for name in mine:
        steps = sorted(mine[name].keys() & theirs.get(name, {}).keys())
        if len(steps) > points:
            steps = sorted({steps[round(i * (len(steps) - 1) / max(1, points - 1))] for i in range(points)})
        if steps:
            found[name] = [(step, mine[name][step], theirs[name][step]) for step in steps]
    return found


def _metrics(names: Sequence[str]) -> list[str]:
    return [name for name in names if is_curve(name)]


def comparison_text(found: dict[str, Any]) -> str:
    """Return the comparison as text."""
    lines = []
    for name, path, typed, complete in zip("ab", found["runs"], found["typed"], found["complete"], strict=True):
        lines.append(printable(f"{name}: {path}{'' if complete else ' (not complete)'}  {' '.join(typed)}").rstrip())
    for title in ("configuration", "environment"):
        pairs = [[key, _cell(a), _cell(b)] for key, (a, b) in found[title].items()]
        lines += ["", *(table_lines([title, "a", "b"], pairs) if pairs else [f"{title}: the same"])]
    apart = found["apart"]
    if found["metrics"]:
        cells = [[key, _cell(a), _cell(b), apart.get(key, _gap(a, b))] for key, (a, b) in found["metrics"].items()]
        lines += ["", *table_lines(["metric", "a", "b", "b - a"], cells)]
    cells = [
        [name if i == 0 else "", str(step), _cell(a), _cell(b), "" if name in apart else _gap(a, b)]
        for name, rows in found["curves"].items()
        for i, (step, a, b) in enumerate(rows)
    ]
    shared = table_lines(["curve", "step", "a", "b", "b - a"], cells)
    return "\n".join([*lines, "", *(shared if cells else ["curves: no step at which both have logged"])])


def _cell(value: Any) -> str:
    text = "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _gap(a: Any, b: Any) -> str:
    if not is_number(a) or not is_number(b) or not math.isfinite(b - a):
        return ""
    return "0" if a == b else f"{b - a:+.3g}"
