"""Small runs, and a teacher's overrides, for the tests of distillation."""

import json
from pathlib import Path
from typing import Any

import pytest

import lathe.training.train
from support import runs
from support.runs import new_run

QUIET = (
    *runs.QUIET,
    "callbacks.throughput=null",
    "trainer.log_every_n_steps=1",
    "compression.receipt=none",
    "data.batch_size=100",
)
MLP = ("model=mlp", "model.net.width=8", "model.net.depth=2", "trainer.max_epochs=2")
TEACHER = ("model=mlp", "model.net.width=32", "model.net.depth=2", "trainer.max_epochs=8", "data.batch_size=50")
RESNET = (
    "model=resnet20",
    "model.net.width=4",
    "model.net.depth=8",
    "data.batch_size=50",
    "trainer.max_epochs=1",
    "test=false",
    "trainer.limit_train_batches=8",
)


def run_of(folder: Path, *overrides: str) -> Path:
    cfg = new_run(folder, *QUIET, *overrides)
    lathe.training.train.train(cfg)
    return Path(cfg["paths"]["run_dir"])


def distilled(teacher: Path | str, *settings: str) -> tuple[str, ...]:
    return (
        "compression=distill",
        f"compression.distill.teacher={teacher}",
        *(f"compression.distill.{item}" for item in settings),
    )


def result(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "result.json").read_text())
    return found


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)
