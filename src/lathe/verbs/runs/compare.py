"""Compare two runs: configuration, environment, metrics and curves."""

import csv
import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from lathe.config.resolve import flatten
from lathe.errors import require
from lathe.files import open_plain
from lathe.runs.metric_names import is_curve, loss_keys
from lathe.runs.rundir import RunDir, open_run
from lathe.verbs.runs.places import differing_environments
from lathe.verbs.runs.table import printable

NOT_SHOWN = ("paths", "launch", "hydra", "resume", "trusted")
LOSSES = tuple(f"{split}{mark}loss" for split in ("train", "val", "test") for mark in "/_")


def compare(words: Sequence[str], columns: Sequence[str] | None, points: int) -> dict[str, Any]:
    """Return the differences between two runs.

    `typed` has the overrides of only one of them, `curves` each metric at `points` equal steps, and `apart` the metrics
    that measure different things, with the reason. `columns` are the metrics to compare; None: all.
    """
    runs = [open_run(word, "compare", look=True) for word in words]
    require(runs[0].path != runs[1].path, f"compare=[{words[0]},{words[1]}]: both are {runs[0].path}; give two runs.")
    a, b = (flatten(run.plain("config.yaml")) for run in runs)
    configuration = {
        key: (a.get(key, "absent"), b.get(key, "absent"))
        for key in sorted(a.keys() | b.keys())
        if a.get(key, "absent") != b.get(key, "absent") and key.split(".")[0] not in NOT_SHOWN
    }
    results = [run.result if run.complete else {} for run in runs]
    numbers = {
        key: (results[0].get(key), results[1].get(key))
        for key in sorted(results[0].keys() | results[1].keys())
        if any(_is_number(result.get(key)) for result in results)
    }
    found = curves(runs, points)
    apart = _apart(results, loss_keys(configuration))
    for key in columns or ():
        require(
            key in numbers or key in found,
            f"columns=[{key}]: neither run has such a metric; they have {', '.join([*numbers, *found][:30])}.",
        )
    return {
        "runs": [str(run.path) for run in runs],
        "typed": _not_shared([run.overrides if (run.path / "overrides.yaml").is_file() else [] for run in runs]),
        "complete": [run.complete for run in runs],
        "configuration": configuration,
        "environment": differing_environments(*(run.environment for run in runs)),
        "metrics": {key: pair for key, pair in numbers.items() if columns is None or key in columns},
        "apart": {name: why for name, why in apart.items() if name in numbers or name in found},
        "curves": {key: rows for key, rows in found.items() if columns is None or key in columns},
    }


def _apart(results: Sequence[dict[str, Any]], keys: Sequence[str]) -> dict[str, str]:
    """Return the metrics whose meaning differs between the runs, with the reason."""
    monitors = [str(result.get("monitor")) for result in results]
    found = {"objective": f"{monitors[0]} and {monitors[1]}"} if all(results) and len({*monitors}) > 1 else {}
    return found | (dict.fromkeys(LOSSES, f"different {', '.join(keys)}") if keys else {})


def curves(runs: Sequence[RunDir], points: int) -> dict[str, list[tuple[int, float, float]]]:
    """Return (step, value, value) of each common metric, at up to `points` of the common steps."""
    ours, theirs = (_logged(run.path) for run in runs)
    found = {}
    for name in ours:
        steps = sorted(ours[name].keys() & theirs.get(name, {}).keys())
        if steps:
            spread = [steps[round(i * (len(steps) - 1) / max(1, points - 1))] for i in range(min(points, len(steps)))]
            spread = steps if len(steps) <= points else [*dict.fromkeys(spread)]
            found[name] = [(step, ours[name][step], theirs[name][step]) for step in spread]
    return found


def show(found: dict[str, Any]) -> str:
    """Return the comparison as text."""
    names = ["a", "b"]
    lines = []
    for name, path, typed, complete in zip(names, found["runs"], found["typed"], found["complete"], strict=True):
        state = "" if complete else " (not complete)"
        lines.append(printable(f"{name}: {path}{state}  {' '.join(typed)}").rstrip())
    for title in ("configuration", "environment"):
        pairs = [[key, _cell(a), _cell(b)] for key, (a, b) in found[title].items()]
        lines += ["", *(_table([title, *names], pairs) if pairs else [f"{title}: the same"])]
    apart = found["apart"]
    numbers = [
        [key, _cell(a), _cell(b), printable(apart[key]) if key in apart else _difference(a, b)]
        for key, (a, b) in found["metrics"].items()
    ]
    if numbers:
        lines += ["", *_table(["metric", *names, "b - a"], numbers)]
    rows = [
        [name if i == 0 else "", str(step), _cell(a), _cell(b), "" if name in apart else _difference(a, b)]
        for name, some in found["curves"].items()
        for i, (step, a, b) in enumerate(some)
    ]
    shared = _table(["curve", "step", *names, "b - a"], rows) if rows else ["curves: no step at which both have logged"]
    return "\n".join([*lines, "", *shared])


def _not_shared(words: list[list[str]]) -> list[list[str]]:
    return [[word for word in own if not all(word in other for other in words)] for own in words]


def _logged(path: Path) -> dict[str, dict[int, float]]:
    """Return the values of metrics.csv by column and step."""
    found: dict[str, dict[int, float]] = {}
    if not (path / "metrics.csv").is_file():
        return found
    with open_plain(path / "metrics.csv", newline="", encoding="utf-8-sig", errors="replace") as file:
        for row in _whole(csv.DictReader(file)):
            for name, text in row.items():
                if name and text and isinstance(text, str) and is_curve(name):
                    try:
                        found.setdefault(name, {})[int(row["step"])] = float(text)
                    except (ValueError, KeyError, TypeError):  # a truncated line, or text
                        continue
    return found


def _whole(rows: Iterator[dict[str, str]]) -> Iterator[dict[str, str]]:
    """Yield the rows up to the first unreadable one."""
    with suppress(csv.Error):
        yield from rows


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _cell(value: Any) -> str:
    text = "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
    text = printable(text)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _difference(a: Any, b: Any) -> str:
    if not _is_number(a) or not _is_number(b):
        return ""
    return "0" if a == b else f"{b - a:+.3g}" if math.isfinite(b - a) else ""


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    return [
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in [head, *rows]
    ]
