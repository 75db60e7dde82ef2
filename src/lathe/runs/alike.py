"""Whether two complete runs are the same run: law 3, for those who interrupt one of them."""

import csv
import itertools
import json
import re
from pathlib import Path
from typing import Any

import torch

from lathe.files import open_plain

# What a clock says, which no two runs share: in result.json, and in the columns of metrics.csv.
RESULT_TIMES = re.compile(
    r"seconds|.*_per_s|step_ms|data_wait|grad_sync|mfu|epoch_s|rank_ms_.*|slowest_rank|energy_.*|peak_.*"
)
LINE_TIMES = ("throughput/", "device/", "DeviceStatsMonitor.")


def rows(directory: Path) -> list[dict[str, str]]:
    """The lines of metrics.csv without empty columns and times."""
    with open_plain(directory / "metrics.csv", newline="", encoding="utf-8-sig") as file:
        lines = list(csv.DictReader(file))
    return [{key: "" if key.startswith(LINE_TIMES) else value for key, value in row.items() if value} for row in lines]


def differences(directory: Path, alone: Path) -> list[str]:
    """What two complete runs do not share, in words."""
    found = []
    for name in ("last", "best"):
        files = (path / "checkpoints" / f"{name}.ckpt" for path in (directory, alone))
        mine, theirs = (torch.load(path, map_location="cpu", weights_only=True)["state_dict"] for path in files)
        if mine.keys() != theirs.keys() or not all(torch.equal(mine[key], theirs[key]) for key in mine):
            found.append(f"weights of {name}.ckpt")
    ours, other = _metrics(directory), _metrics(alone)
    unlike = sorted(key for key in ours | other if ours.get(key) != other.get(key))
    found += [f"result.json: {key} {ours.get(key)} in place of {other.get(key)}" for key in unlike]
    pairs = list(itertools.zip_longest(rows(directory), rows(alone)))
    found += [f"metrics.csv: {mine} in place of {theirs}" for mine, theirs in pairs if mine != theirs][:2]
    there = [{path.name for path in folder.glob("receipt.*")} for folder in (directory, alone)]
    found += [f"no {name}" for name in sorted(there[1] - there[0])]
    return found + [f"left: {path.relative_to(directory)}" for path in directory.rglob(".*") if path.name != ".lock"]


def _metrics(directory: Path) -> dict[str, Any]:
    result = json.loads((directory / "result.json").read_text())
    return {key: repr(value) for key, value in result.items() if not RESULT_TIMES.fullmatch(key.rpartition("/")[2])}
