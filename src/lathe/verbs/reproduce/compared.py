"""Compare two runs of one configuration: weights, results and metrics."""

import itertools
from typing import Any

import torch
from torch import Tensor

from lathe.runs.checkpoints import read_checkpoint
from lathe.runs.compare_runs import RESULT_TIMES, metric_rows
from lathe.runs.rundir import RunDir

NOT_METRICS = ("tags", "notes", "directions")


def checkpoints(run: RunDir) -> dict[str, dict[str, Any]]:
    """Return the contents of a run's best.ckpt and last.ckpt; raise UserError if one is damaged."""
    paths = {name: run.path / "checkpoints" / f"{name}.ckpt" for name in ("best", "last")}
    return {name: read_checkpoint(path, name) for name, path in paths.items() if path.exists()}


def weights(run: RunDir, again: RunDir) -> dict[str, dict[str, Any]]:
    """Compare best.ckpt and last.ckpt tensor by tensor; `missing` is the run that lacks one."""
    mine, theirs = checkpoints(run), checkpoints(again)
    found: dict[str, dict[str, Any]] = {}
    for name in ("best", "last"):
        if name in mine and name in theirs:
            found[f"{name}.ckpt"] = _tensors(mine[name]["state_dict"], theirs[name]["state_dict"])
        elif name in mine or name in theirs:
            found[f"{name}.ckpt"] = {"missing": str((again if name in mine else run).path)}
    return found


def _tensors(mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> dict[str, Any]:
    names = mine.keys() | theirs.keys()
    unlike = [name for name in names if not _equal(mine.get(name), theirs.get(name))]
    gaps = [_gap(mine[name], theirs[name]) for name in unlike if name in mine and name in theirs]
    return {"tensors": len(names), "differ": len(unlike), "largest": max((gap for gap in gaps), default=0.0)}


def _equal(a: Tensor | None, b: Tensor | None) -> bool:
    """Return whether tensors are equal, NaN with NaN; the sign of zero is ignored."""
    if a is None or b is None or a.shape != b.shape or a.dtype != b.dtype:
        return False
    return bool(torch.equal(a, b)) or bool(((a == b) | ((a != a) & (b != b))).all())


def _gap(a: Tensor, b: Tensor) -> float:
    if a.shape != b.shape or not a.numel():
        return float("inf")
    return float((a.double() - b.double()).abs().nan_to_num(nan=float("inf")).max())


def metrics(run: RunDir, again: RunDir) -> dict[str, tuple[Any, Any]]:
    """Return the entries of result.json that differ, without times."""
    mine, theirs = run.result, again.result
    names = [key for key in sorted(mine.keys() | theirs.keys()) if key not in NOT_METRICS]
    return {
        key: (mine.get(key), theirs.get(key))
        for key in names
        if mine.get(key) != theirs.get(key) and not RESULT_TIMES.fullmatch(key.rpartition("/")[2])
    }


def first_difference(run: RunDir, again: RunDir) -> dict[str, Any] | None:
    """Return the step and the differing columns of the first differing line of metrics.csv."""
    if not (run.path / "metrics.csv").is_file():
        return None
    nothing: dict[str, str] = {}
    for mine, theirs in itertools.zip_longest(metric_rows(run.path), metric_rows(again.path), fillvalue=nothing):
        names = [key for key in mine | theirs if mine.get(key) != theirs.get(key)]
        if names:
            step = mine.get("step") or theirs.get("step")
            return {"step": int(step or 0), "columns": {key: (mine.get(key), theirs.get(key)) for key in names}}
    return None
