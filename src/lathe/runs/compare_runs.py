"""Compares two complete runs bit for bit, such as an interrupted and an uninterrupted one."""

import csv
import itertools
import json
import re
from pathlib import Path
from typing import Any

import torch

from lathe.files import open_plain

# Measured times and memory, which differ between any two runs: in result.json, and in the columns of metrics.csv.
RESULT_TIMES = re.compile(
    r"seconds|.*_per_s|step_ms|data_wait|grad_sync|mfu|epoch_s|rank_ms_.*|slowest_rank|energy_.*|peak_.*"
)
LINE_TIMES = ("throughput/", "device/", "DeviceStatsMonitor.")


def metric_rows(directory: Path) -> list[dict[str, str]]:
    """Read metrics.csv without empty columns and times."""
    with open_plain(directory / "metrics.csv", newline="", encoding="utf-8-sig") as file:
        lines = list(csv.DictReader(file))
    return [{key: "" if key.startswith(LINE_TIMES) else value for key, value in row.items() if value} for row in lines]


def compare_runs(directory: Path, reference: Path) -> list[str]:
    """Return a line for each difference between two run directories: weights, results, metrics and files."""
    found = []
    for name in ("last", "best"):
        files = (path / "checkpoints" / f"{name}.ckpt" for path in (directory, reference))
        mine, theirs = (torch.load(path, map_location="cpu", weights_only=True)["state_dict"] for path in files)
        if mine.keys() != theirs.keys() or not all(torch.equal(mine[key], theirs[key]) for key in mine):
            found.append(f"weights of {name}.ckpt")
    ours, other = _results(directory), _results(reference)
    changed = sorted(key for key in ours | other if ours.get(key) != other.get(key))
    found += [f"result.json: {key} {ours.get(key)} instead of {other.get(key)}" for key in changed]
    pairs = itertools.zip_longest(metric_rows(directory), metric_rows(reference))
    found += [f"metrics.csv: {mine} instead of {theirs}" for mine, theirs in pairs if mine != theirs][:2]
    receipts, expected = ({path.name for path in folder.glob("receipt.*")} for folder in (directory, reference))
    found += [f"no {name}" for name in sorted(expected - receipts)]
    return found + [f"left: {path.relative_to(directory)}" for path in directory.rglob(".*") if path.name != ".lock"]


def _results(directory: Path) -> dict[str, Any]:
    result = json.loads((directory / "result.json").read_text())
    return {key: repr(value) for key, value in result.items() if not RESULT_TIMES.fullmatch(key.rpartition("/")[2])}
