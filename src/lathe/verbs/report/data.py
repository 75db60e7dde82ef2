"""The report of the page as plain JSON data."""

import csv
import math
import os
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from importlib import metadata
from itertools import islice
from pathlib import Path
from typing import Any

from lathe.config.metric_split import split_of
from lathe.files import open_plain
from lathe.runs.metric_names import is_curve, without_split
from lathe.verbs.report.assemble import Report
from lathe.verbs.report.collect import Run
from lathe.verbs.report.cost import cost, short
from lathe.verbs.report.groups import Group, group_of
from lathe.verbs.report.marks import against, counts, left_out
from lathe.verbs.report.metrics import available

POINTS = 100  # at most, of a curve
MOST = 8  # curves of a run whose metric names have no split
Curve = tuple[list[int], list[float]]


def page_data(report: Report, folder: Path = Path()) -> dict[str, Any]:
    """Return the report of the first metric, with every run's curves and links relative to `folder`."""
    metric = report.metrics[0]
    waiting = left_out([], report.waiting)
    return {
        "title": report.title,
        "metric": metric,
        "metrics": available(report.runs),
        "direction": report.directions[metric],
        "confidence": report.how.share,
        "factors": report.factors,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "lathe": _version(),
        "counts": counts(report.runs),
        "marks": [*report.marks, *waiting],
        "runs": [_run(run, report, folder) for run in report.runs],
        "groups": [_group(group, report) for group in report.groups],
        "pairs": [
            {
                "a": pair.a,
                "b": pair.b,
                "n": pair.told.n,
                "difference": pair.told.difference,
                "interval": _list(pair.told.interval),
                "p": pair.told.p,
                "says": pair.says,
            }
            for pair in report.pairs[metric]
        ],
    }


def _version() -> str:
    with suppress(metadata.PackageNotFoundError):
        return metadata.version("lathe")
    return "unknown"


def _list(pair: tuple[float, float] | None) -> list[float] | None:
    return None if pair is None else list(pair)


def _group(group: Group, report: Report) -> dict[str, Any]:
    metric = report.metrics[0]
    told = group.summary(metric, report.how)
    return {
        "label": group.label,
        "factors": plain(group.brief),
        "n": told.n,
        "mean": told.mean,
        "std": told.std,
        "interval": _list(told.interval),
        "why": told.why,
        "best": group.best(metric, report.directions[metric]),
        "seconds": group.mean_of("seconds"),
        "parameters": group.mean_of("parameters"),
        "command": group.command,
        "marks": group.marks,
    }


def _run(run: Run, report: Report, folder: Path) -> dict[str, Any]:
    at = group_of(report.groups, run)
    return {
        "path": None if run.path is None else _near(run.path),
        "name": str(run.leaves.get("name", run.name)),
        "state": run.state,
        "group": at,
        "seed": plain(run.seed),
        "fold": plain(run.fold),
        "factors": {} if at is None else plain(report.groups[at].brief),
        "metrics": run.metrics,
        "seconds": run.metrics.get("seconds"),
        "parameters": run.metrics.get("parameters"),
        "cost": cost(run),
        "curves": {} if run.path is None else curves(run.path / "metrics.csv"),
        "diff": plain(against(run, report.differences.usual)) if run.leaves else {},
        "command": run.command(),
        "environment": plain(_environment(run)),
        "receipt": plain(short(run)),
        "samples": _samples(run, folder),
        "sentence": run.sentence,
    }


def plain(value: Any) -> Any:
    """Return a value of a configuration as JSON; non-finite numbers, dates and other keys become text."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    fits = value is None or isinstance(value, (bool, int, str)) or (isinstance(value, float) and math.isfinite(value))
    return value if fits else str(value)


def _near(path: Path) -> str:
    """Return a path relative to the working directory if it is below it, else absolute."""
    return os.path.relpath(path) if path.absolute().is_relative_to(Path.cwd()) else str(path.absolute())


def _environment(run: Run) -> dict[str, Any]:
    told, packages = run.environment, run.environment.get("packages")
    return {
        "torch": packages.get("torch") if isinstance(packages, dict) else None,
        "python": told.get("python"),
        "device": f"{run.leaves.get('trainer.accelerator', 'unknown')} x {run.result.get('devices', 'unknown')}",
        "cpu": told.get("cpu"),
        "commit": told.get("git_commit"),
        "dirty": bool(told.get("git_diff")),
    }


def _samples(run: Run, folder: Path) -> str | None:
    """Return the link from `folder` to the page of single predictions."""
    pages = sorted((run.path / "samples").glob("*.html")) if run.path is not None else []
    return Path(os.path.relpath(pages[0], folder)).as_posix() if pages else None


def curves(path: Path) -> dict[str, Curve]:
    """Return the validation metrics and the training loss of a metrics.csv as thinned steps and values.

    Without either, the first `MOST` metrics; {} if the file can't be read.
    """
    found: dict[str, Curve] = {}
    with suppress(OSError, UnicodeDecodeError, csv.Error), open_plain(path, newline="", encoding="utf-8-sig") as file:
        lines = csv.reader(file)
        names = next(lines, [])
        kept = _drawn(names)
        wanted = [(at, name) for at, name in enumerate(names) if name in kept]
        if "step" in names:
            step = names.index("step")
            for line in islice(lines, 10_000_000):
                _add(found, wanted, line, line[step] if len(line) > step else "")
    return {name: _thinned(*curve) for name, curve in found.items()}


def _drawn(names: Sequence[str]) -> list[str]:
    losses = ("loss", "loss_step")  # `loss_step` if Lightning logs both steps and epochs
    usual = [
        name
        for name in names
        if split_of(name) == "val" or (split_of(name) == "train" and without_split(name) in losses)
    ]
    return usual or [name for name in names if is_curve(name)][:MOST]


def _add(found: dict[str, Curve], wanted: Sequence[tuple[int, str]], line: Sequence[str], step: str) -> None:
    for at, name in wanted:
        if at < len(line) and line[at]:
            with suppress(ValueError):
                value, when = float(line[at]), int(float(step))
                if math.isfinite(value):
                    steps, values = found.setdefault(name, ([], []))
                    steps.append(when)
                    values.append(value)


def _thinned(steps: list[int], values: list[float]) -> Curve:
    """Return at most POINTS points, with both ends."""
    if len(steps) <= POINTS:
        return steps, values
    kept = [round(number * (len(steps) - 1) / (POINTS - 1)) for number in range(POINTS)]
    return [steps[at] for at in kept], [values[at] for at in kept]
