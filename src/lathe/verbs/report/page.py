"""The report as one HTML file that works offline, with a content security policy.

Plotly's basic bundle (web/plotly-basic.min.js, version 4.1.1, of npm's plotly.js-basic-dist-min) and the data are
embedded compressed, and the browser inflates them. Names and values of runs are untrusted: they are embedded as base64,
and the page's script shows them as text.
"""

import base64
import functools
import gzip
import hashlib
import html
import json
import math
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from importlib import metadata
from importlib.resources import files
from pathlib import Path
from typing import Any

from lathe.config.metric_names import cost_of, is_curve, split_of, without_split
from lathe.html_page import style_sheet
from lathe.verbs.report.assemble import Report, available, counts, left_out
from lathe.verbs.report.groups import ABSENT, Group, code
from lathe.verbs.runs.reader import Curve, Run, finite, is_number, spread

MOST = 8  # curves of a run whose metric names have no split
# Plotly sets style attributes, which can't be hashed; styles can't load anything here
POLICY = (
    "default-src 'none'; script-src {scripts}; style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'; "
    "form-action 'none'"
)
SCRIPTS = ("page.js", "plots.js")
POINTS = 100  # at most, of a curve, which looks like the original in a plot of 400 pixels
ALL_POINTS = 400_000  # of all curves; keeps the page below 3 MB
MINIMUM = 20  # complete runs: in 1 of 20 cases chance gives a factor of two levels 18 %; with ten runs 37 %
CUT = 4  # numeric factors with more values are cut into this many bins
WAY = 0.3  # rank correlation from which a direction is reported


def page_data(report: Report, folder: Path = Path()) -> dict[str, Any]:
    """Return the report of the first metric as docs/report.md describes it, with links relative to `folder`."""
    metric, version = report.metrics[0], "unknown"
    with suppress(metadata.PackageNotFoundError):
        version = metadata.version("lathe")
    places = {id(run): at for at, group in enumerate(report.groups) for run in group.runs}
    return {
        "title": report.title,
        "metric": metric,
        "metrics": available(report.runs),
        "direction": report.directions[metric],
        "confidence": report.how.confidence,
        "factors": report.factors,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "lathe": version,
        "counts": counts(report.runs),
        "marks": [*report.marks, *left_out([], report.waiting)],
        "runs": [_run(run, places.get(id(run)), report, folder) for run in report.runs],
        "groups": [_group(group, report) for group in report.groups],
        "pairs": [
            {"a": pair.a, "b": pair.b, **_json(asdict(pair.test)), "says": pair.says} for pair in report.pairs[metric]
        ],
    }


def _group(group: Group, report: Report) -> dict[str, Any]:
    metric = report.metrics[0]
    return {
        "label": group.label,
        "factors": _json(group.brief),
        **_json(asdict(group.summary(metric, report.how))),
        "best": group.best(metric, report.directions[metric]),
        "seconds": group.mean_of("seconds"),
        "parameters": group.mean_of("parameters"),
        "command": group.command,
        "marks": group.marks,
    }


def _run(run: Run, group: int | None, report: Report, folder: Path) -> dict[str, Any]:
    samples = sorted((run.path / "samples").glob("*.html")) if run.path is not None else []
    leaves = {key: run.leaves.get(key, ABSENT) for key in report.differences.usual} if run.leaves else {}
    environment, packages = run.environment, run.environment.get("packages")
    receipt = ("compression", "baseline", "ships", "bytes_share", "findings", "warnings")
    data = {
        "path": None if run.path is None else run.where,
        "name": str(run.leaves.get("name", run.label)),
        "state": run.state,
        "group": group,
        "seed": run.seed,
        "fold": run.fold,
        "factors": {} if group is None else report.groups[group].brief,
        "metrics": run.metrics,
        "seconds": run.metrics.get("seconds"),
        "parameters": run.metrics.get("parameters"),
        "cost": cost_of(run.receipt),
        "curves": curves(run),
        "diff": {key: value for key, value in leaves.items() if code(value) != code(report.differences.usual[key])},
        "command": run.command(),
        "environment": {
            "torch": packages.get("torch") if isinstance(packages, dict) else None,
            "python": environment.get("python"),
            "device": f"{run.leaves.get('trainer.accelerator', 'unknown')} x {run.result.get('devices', 'unknown')}",
            "cpu": environment.get("cpu"),
            "commit": environment.get("git_commit"),
            "dirty": bool(environment.get("git_diff")),
        },
        "receipt": {name: run.receipt.get(name) for name in receipt} if run.receipt else None,
        "samples": Path(os.path.relpath(samples[0], folder)).as_posix() if samples else None,
        "sentence": run.sentence,
    }
    return dict(_json(data))


def _json(value: Any) -> Any:
    """Return a value as JSON; non-finite numbers, dates and keys that are not text become text."""
    if isinstance(value, dict):
        return {str(key): _json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_json(item) for item in value]
    fits = value is None or isinstance(value, (bool, int, str)) or (isinstance(value, float) and math.isfinite(value))
    return value if fits else str(value)


def curves(run: Run) -> dict[str, Curve]:
    """Return a run's validation metrics and training loss, else its first `MOST`: 100 finite points of each."""
    result = {}
    for name, curve in run.curves(_drawn).items():
        points = [(step, value) for step, value in zip(*curve, strict=True) if math.isfinite(value)]
        thinned = [points[at] for at in spread(len(points), POINTS)]
        if thinned:
            result[name] = ([step for step, _ in thinned], [value for _, value in thinned])
    return result


def _drawn(names: Sequence[str]) -> list[str]:
    losses = ("loss", "loss_step")  # `loss_step` if Lightning logs both steps and epochs
    splits = {name: split_of(name) for name in names}
    usual = [
        name for name in names if splits[name] == "val" or (splits[name] == "train" and without_split(name) in losses)
    ]
    return usual or [name for name in names if is_curve(name)][:MOST]


def importance(data: dict[str, Any]) -> dict[str, Any]:
    """Return rows of factor, share (0 to 1), levels and direction; or `why` there are none.

    The share is epsilon squared of the Kruskal-Wallis test (Kelley, 1935; Tomczak and Tomczak, 2014): the variance of
    ranks between a factor's levels, corrected for chance, at least 0. Numeric factors with more than `CUT` values are
    cut into `CUT` bins of about equal size, so that an optimum in the middle counts. The direction is Spearman's rank
    correlation of numbers, None if it is weaker than `WAY`. `data` is that of the page.
    """
    scored = [(run["metrics"].get(data["metric"]), run) for run in data["runs"] if run["state"] == "complete"]
    runs = [(value, run["factors"]) for value, run in scored if is_number(value) and value == value]
    result: dict[str, Any] = {"rows": [], "why": None, "n": len(runs), "cut": CUT}
    if len(runs) < MINIMUM:
        have = "run has" if len(runs) == 1 else "runs have"
        why = f"{len(runs)} complete {have} {data['metric']}, and importance needs {MINIMUM}: of fewer, "
        return result | {"why": f"{why}a factor that does nothing looks important by chance."}
    values = [value for value, _ in runs]
    if len(set(values)) == 1:
        return result | {"why": f"Every complete run has the same {data['metric']}: there is nothing to explain."}
    rows = [_importance_row(factor, [factors.get(factor) for _, factors in runs], values) for factor in data["factors"]]
    shares = sorted((row for row in rows if row is not None), key=lambda row: -row["share"])
    return result | {
        "rows": shares,
        "why": None if shares else "No factor has levels with two runs each: there is nothing to average over.",
    }


def _importance_row(factor: str, levels: Sequence[Any], metric: Sequence[float]) -> dict[str, Any] | None:
    from scipy import stats

    numbers, n = all(map(is_number, levels)), len(levels)
    if numbers and len(set(levels)) > CUT:
        names = [str(min(CUT - 1, int(CUT * (rank - 0.5) / n))) for rank in stats.rankdata(levels)]
    else:
        names = list(map(repr, levels))
    by_level: dict[str, list[float]] = {}
    for name, value in zip(names, metric, strict=True):
        by_level.setdefault(name, []).append(value)
    k = len(by_level)
    if k < 2 or 2 * k > n:
        return None
    explained = float(stats.kruskal(*by_level.values()).statistic) / (n - 1)
    share = max(0.0, 1 - (1 - explained) * (n - 1) / (n - k))
    rho = float(stats.spearmanr(levels, metric).statistic) if numbers else 0.0
    return {"factor": factor, "share": share, "levels": k, "direction": rho if abs(rho) >= WAY else None}


def with_short_curves(data: dict[str, Any]) -> dict[str, Any]:
    """Return `data` with curves [index into data["steps"], values] of five digits, with fewer points if many."""
    points = min(POINTS, max(10, ALL_POINTS // max(1, sum(len(run["curves"]) for run in data["runs"]))))
    steps: dict[tuple[Any, ...], int] = {}
    runs = []
    for run in data["runs"]:
        curves = {}
        for name, (xs, ys) in run["curves"].items():
            if kept_points := spread(len(xs), points):
                axis = steps.setdefault(tuple(xs[i] for i in kept_points), len(steps))
                curves[name] = [
                    axis,
                    [float(f"{y:.5g}") if (y := finite(ys[i])) is not None else None for i in kept_points],
                ]
        runs.append({**run, "curves": curves})
    thinned = None if points == POINTS else f"So that it stays small, curves have at most {points} points."
    return {**data, "runs": runs, "steps": list(map(list, steps)), "thinned": thinned}


def page(data: dict[str, Any]) -> str:
    plotly, packed_plotly = _plotly()
    script = "\n".join(map(_file, SCRIPTS))
    parts = {
        "POLICY": POLICY.format(scripts=f"{_hash(script)} {_hash(plotly)}"),
        "TITLE": html.escape(str(data["title"])),
        "STYLE": style_sheet() + _file("page.css"),
        "SCRIPT": script,
        "PLOTLY": packed_plotly,
    }
    shown = with_short_curves({**data, "importance": importance(data)})
    parts["DATA"] = _packed(json.dumps(_json(shown), separators=(",", ":")).encode())
    # in one pass, since a title may contain a placeholder
    return re.sub("__([A-Z]+)__", lambda mark: parts[mark[1]], _file("page.html"))


@functools.cache
def _plotly() -> tuple[str, str]:
    """Return Plotly's script, and it compressed, which is the slowest part of the page."""
    script = _file("plotly-basic.min.js")
    return script, _packed(script.encode())


def _packed(content: bytes) -> str:
    return base64.b64encode(gzip.compress(content, 9, mtime=0)).decode()


def _file(name: str) -> str:
    return files("lathe.verbs.report").joinpath("web", name).read_text(encoding="utf-8")


def _hash(script: str) -> str:
    """Return the policy's expression for a script of exactly that text."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
