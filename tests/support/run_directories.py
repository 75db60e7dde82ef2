"""Run directories as from training, written directly: many in little time, with chosen metrics."""

import json
from collections.abc import Sequence
from copy import deepcopy
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path
from typing import Any

from lathe.trust.safe_yaml import as_yaml
from support.runs import SMALL, config

ENVIRONMENT = {
    "command": ["train.py"],
    "launch_id": None,
    "python": "3.11.7",
    "platform": "Linux",
    "cpu": "A processor",
    "cores": 2,
    "packages": {"lathe": "0.1.0", "torch": "2.13.0"},
    "git_commit": "1234567" * 5 + "12345",
    "git_diff": "",
}
RESULT = {
    "steps": 40,
    "epochs": 2,
    "devices": 1,
    "best_step": 40,
    "monitor": "val/accuracy",
    "directions": {"loss": "min", "accuracy": "max"},
    "seconds": 2.0,
}


@cache
def composed(words: tuple[str, ...]) -> dict[str, Any]:
    return config(*SMALL, *words)


def write_run(
    log_dir: Path,
    number: int,
    accuracy: float | None = None,
    words: Sequence[str] = (),
    seed: int = 42,
    environment: dict[str, Any] | None = None,
    **result: Any,
) -> Path:
    """Write the run directory of `train.py` with these overrides, and return it.

    It is complete if it has an accuracy. `number` orders it among others; `result` is added to result.json.
    """
    cfg = deepcopy(composed(tuple(words)))
    cfg["seed"] = cfg["data"]["seed"] = seed
    path = log_dir / str(cfg["name"]) / f"2026-11-23_{number // 3600:02}-{number // 60 % 60:02}-{number % 60:02}_a1b2c3"
    cfg["paths"] |= {"log_dir": str(log_dir), "run_dir": str(path)}
    path.mkdir(parents=True)
    (path / ".lock").touch()
    (path / "config.yaml").write_text(as_yaml(cfg))
    typed = [*SMALL, *words, f"seed={seed}"]
    (path / "overrides.yaml").write_text(as_yaml(typed))
    began = {"started": (datetime(2026, 11, 23, tzinfo=UTC) + timedelta(seconds=number)).isoformat()}
    (path / "environment.json").write_text(json.dumps(ENVIRONMENT | began | (environment or {})))
    rows = ["step,train/loss,val/accuracy", *(f"{step},{2 / step},{'' if step % 2 else step / 100}" for step in (1, 2))]
    (path / "metrics.csv").write_text("\n".join(rows) + "\n")
    if accuracy is not None:
        measured = {"test/accuracy": accuracy, "val/accuracy": accuracy + 0.01, "test/loss": 1 - accuracy}
        told = {"objective": accuracy + 0.01, "seed": seed, "name": cfg["name"], "parameters": 1000}
        (path / "result.json").write_text(json.dumps({**RESULT, **measured, **told, **result}))
    return path


def write_sweep(log_dir: Path, jobs: Sequence[dict[str, Any]], name: str = "2026-11-23_10-00-00_abc123") -> Path:
    """Write the directory of a sweep with these jobs, and return it."""
    path = log_dir / "sweeps" / name
    (path / "jobs").mkdir(parents=True)
    (path / "sweep.yaml").write_text(as_yaml({"format": 1, "words": [], "sweep": {}, "name": "train"}))
    usual = {"state": "complete", "run_dir": None, "objective": None, "tries": 1, "seconds": 1.0, "sentence": None}
    for number, job in enumerate(jobs):
        told = {"number": number, "overrides": [], **usual, **job}
        (path / "jobs" / f"{number:05}.json").write_text(json.dumps(told))
    return path
