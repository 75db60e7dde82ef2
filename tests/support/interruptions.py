"""Deaths of a run for the tests of law 3, and the comparison with an uninterrupted run."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer

import lathe.training.train
from lathe.callbacks.throughput import RESULTS
from lathe.tasks import Task
from support.commands import command, start
from support.runs import QUIET, new_run, rows, runs, weights

SEED = os.environ.get("LATHE_KILL_SEED", "1")
# a run of a tenth of a second: 1300 samples in 6 batches an epoch
QUICK = (
    "model=mlp",
    "model.net.width=8",
    "model.net.depth=1",
    *QUIET,
    "trainer.log_every_n_steps=1",
    "data.batch_size=256",
    "callbacks.throughput=null",
    "test=false",
)


def same(left: Path, right: Path) -> None:
    """Assert equal weights and lines."""
    for name in ("last", "best"):
        ours, theirs = weights(left, name), weights(right, name)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in ours), name
    measured = any(key.startswith(MEASURED) for key in rows(left)[0])
    assert lines(left) == lines(right)
    assert measured or rows(left) == rows(right)


MEASURED = ("throughput/", "device/", "seconds")  # times and hardware measurements


def lines(directory: Path) -> dict[str, dict[str, str | None]]:
    """Return the filled columns of each step, with None for measurements, which vary."""
    found: dict[str, dict[str, str | None]] = {}
    for row in rows(directory):
        found.setdefault(row["step"], {}).update(
            {key: None if key.startswith(MEASURED) else value for key, value in row.items() if value}
        )
    return found


def equal(left: Path, right: Path) -> None:
    """Assert equal weights, lines and results."""
    same(left, right)
    ours, theirs = (json.loads((path / "result.json").read_text()) for path in (left, right))
    varies = {"seconds", "samples_per_s", *RESULTS}
    assert {key: ours[key] for key in ours if key not in varies} == {
        key: theirs[key] for key in theirs if key not in varies
    }


NEVER = 10**9


class Interrupted(Exception):
    """The simulated death of the process."""


class Interruption(Callback):
    """A death in a named hook at a certain step; "SIGTERM on_validation_end" signals the process instead."""

    def __init__(self) -> None:
        self.hook, self.step = "", NEVER

    def _maybe(self, hook: str, trainer: Trainer) -> None:
        signalled, _, named = self.hook.rpartition(" ")
        if hook == named and trainer.global_step >= self.step and not trainer.sanity_checking:
            if not signalled:
                raise Interrupted
            signal.raise_signal(signal.Signals[signalled])

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        self._maybe("on_train_batch_start", trainer)

    def on_validation_start(self, trainer: Trainer, task: Task) -> None:
        self._maybe("on_validation_start", trainer)

    def on_validation_end(self, trainer: Trainer, task: Task) -> None:
        self._maybe("on_validation_end", trainer)

    def on_train_epoch_end(self, trainer: Trainer, task: Task) -> None:
        self._maybe("on_train_epoch_end", trainer)

    def on_test_start(self, trainer: Trainer, task: Task) -> None:
        self._maybe("on_test_start", trainer)


@pytest.fixture
def interruption(monkeypatch: pytest.MonkeyPatch) -> Interruption:
    callback = Interruption()
    make = lathe.training.train.make_callbacks
    monkeypatch.setattr(lathe.training.train, "make_callbacks", lambda cfg, task: [*make(cfg, task), callback])
    return callback


def train_through(cfg: dict[str, Any], deaths: list[tuple[str, int]], interruption: Interruption) -> Path:
    """Train through each of `deaths`, or past it if a resumed run does not reach it again, to the end."""
    for interruption.hook, interruption.step in [*deaths, ("", NEVER)]:
        try:
            lathe.training.train.train(dict(cfg))
            break
        except Interrupted:
            continue
    return Path(cfg["paths"]["run_dir"])


def compare(folder: Path, interruption: Interruption, deaths: list[tuple[str, int]], *overrides: str) -> Path:
    """Compare a run through `deaths` with an uninterrupted one, and return the latter's directory."""
    alone = train_through(new_run(folder / "alone", *overrides), [], interruption)
    same(alone, train_through(new_run(folder / "dies", *overrides), deaths, interruption))
    assert interruption.hook == "", "each death has to happen, or the test shows nothing"
    return alone


def kill_when(directory_of: Path, lines: int, *arguments: str) -> Path:
    """Start the real command, and kill its process group once metrics.csv has more than `lines` lines."""
    process = start(command(*arguments), directory_of.parent, session=True, fork_ranks=True)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        found = runs(directory_of)
        if found and (found[0] / "metrics.csv").exists() and (found[0] / "metrics.csv").read_text().count("\n") > lines:
            break
        assert process.poll() is None, "the run ended before it could be killed"
        time.sleep(0.002)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=60)
    (directory,) = runs(directory_of)
    assert not (directory / "result.json").exists()
    return directory
