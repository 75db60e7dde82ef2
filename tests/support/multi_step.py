"""Runs that record the sizes of groups of steps."""

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback

import lathe.training.train
from lathe.trainer import multi_step
from lathe.trainer.multi_step import MultiStep
from support.runs import SMALL, new_run

STEPS = 40  # two epochs of 1300 samples in batches of 64


class Sees(Callback):
    """Records the steps that it sees."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.steps.append(trainer.global_step)


class SeesEveryThird(Sees):
    """Declares that it skips the steps between."""

    def skippable_steps(self, trainer: Any) -> float:
        return 2 - trainer.global_step % 3


class SeesEach(SeesEveryThird):
    """Declares the same, but has one hook called at every step."""

    every_step = ("on_train_batch_end",)


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the groups of steps."""
    found: list[int] = []
    run_groups = MultiStep.run_groups

    def counted(self: MultiStep, most: float) -> int:
        count = run_groups(self, most)
        found.extend([count] if count else [])
        return count

    monkeypatch.setattr(MultiStep, "run_groups", counted)
    multi_step._reported.clear()
    return found


def train(folder: Path, monkeypatch: pytest.MonkeyPatch, *own: Callback, words: tuple[str, ...] = ()) -> Path:
    make = lathe.training.train.make_callbacks
    monkeypatch.setattr(lathe.training.train, "make_callbacks", lambda cfg, task: [*make(cfg, task), *own])
    cfg = new_run(folder, *SMALL, "test=false", *words)
    lathe.training.train.train(cfg)
    return Path(cfg["paths"]["run_dir"])
