"""Prediction requests, and their output."""

import csv
from pathlib import Path
from typing import Any

import numpy as np

from lathe.runs.rundir import RunDir
from support.runs import config


def request(run: RunDir, source: Path, output: Path, *overrides: str) -> dict[str, Any]:
    asked = config(
        f"run={run.path}",
        f"input={source}",
        f"output={output}",
        "trainer.accelerator=cpu",
        "trainer.enable_progress_bar=false",
        *overrides,
        name="predict",
    )
    cfg = run.config
    cfg["trainer"] |= asked["trainer"]
    cfg["strategy"], cfg["request"] = asked["strategy"], asked
    return cfg


def rows(output: Path) -> list[list[str]]:
    with open(output, newline="") as file:
        return list(csv.reader(file))


def save(folder: Path, array: np.ndarray) -> Path:
    np.save(folder / "images.npy", array)
    return folder / "images.npy"
