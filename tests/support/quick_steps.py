"""Runs of which it is noted how many steps were made at once."""

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback

import lathe.verbs.train
from lathe.callbacks import Throughput
from lathe.tasks.loops import quiet
from lathe.tasks.loops.quick import Steps
from support.runs import SMALL, new_run

STEPS = 40  # two epochs of 1300 samples in batches of 64


class Sees(Callback):
    """Notes the steps that it is shown."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.steps.append(trainer.global_step)


class SeesEveryThird(Sees):
    """Says that it can do without those between."""

    def quiet_steps(self, trainer: Any) -> float:
        return 2 - trainer.global_step % 3


class SeesEach(SeesEveryThird):
    """Says so, and wants one of its hooks called all the same."""

    each_step = ("on_train_batch_end",)


class OwnThroughput(Throughput):
    """As a user derives one."""

    seen = 0

    def on_train_batch_end(self, *args: Any) -> None:
        type(self).seen += 1
        super().on_train_batch_end(*args)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many steps were made at once."""
    found: list[int] = []
    made = Steps.quick

    def counted(self: Steps, most: float) -> int:
        count = made(self, most)
        found.extend([count] if count else [])
        return count

    monkeypatch.setattr(Steps, "quick", counted)
    quiet._TOLD.clear()
    return found


def train(folder: Path, monkeypatch: pytest.MonkeyPatch, *own: Callback, words: tuple[str, ...] = ()) -> Path:
    make = lathe.verbs.train.make_callbacks
    monkeypatch.setattr(lathe.verbs.train, "make_callbacks", lambda cfg, task: [*make(cfg, task), *own])
    cfg = new_run(folder, *SMALL, "test=false", *words)
    lathe.verbs.train.train(cfg)
    return Path(cfg["paths"]["run_dir"])
