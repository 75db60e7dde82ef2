"""data.num_workers=auto takes the faster number of workers and changes no batch."""

import math
import os
import random
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from multiprocessing import active_children
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.own_datasets import Drawing
from torch.utils.data import Dataset

from lathe.data import DatasetDataModule, Digits, ImageDataModule, workers
from lathe.data.workers import Reader, choose_workers
from lathe.errors import UserError, worker_message

N = 1000


class Machine:
    """A simulated clock. A sample takes `seconds`, and up to `cores` workers read in parallel."""

    def __init__(self, seconds: float, cores: int = 1, fails: bool = False) -> None:
        self.seconds, self.cores, self.fails, self.now = seconds, cores, fails, 0.0

    def read(self, count: int, lists: Iterable[list[int]]) -> Iterator[list[int]]:
        if count and self.fails:
            raise RuntimeError("a worker was killed")
        for samples in lists:
            self.now += self.seconds * len(samples) / max(1, min(count, self.cores))
            yield samples


@pytest.mark.parametrize(
    ("machine", "batches", "taken", "why"),
    [
        (Machine(0.001, 4), math.inf, 4, "batches/s are 31.2 with 0, 125 with 4"),
        (Machine(0.001, 1), math.inf, 0, "batches/s are 31.2 with 0, 31.2 with 4"),
        (Machine(0.001, 4), 50, 0, "reading the 50 batches ahead takes 1.6 s"),
        (Machine(0.5, 4), 200, 4, "batches/s are 0.0625 with 0, 0.25 with 4"),  # measured by single samples
        (Machine(0.001, 4, fails=True), 200, 0, "reading to measure it failed (RuntimeError)"),
    ],
)
def test_the_number_that_is_faster_beyond_noise(
    monkeypatch: pytest.MonkeyPatch, machine: Machine, batches: float, taken: int, why: str
) -> None:
    monkeypatch.setattr(workers, "perf_counter", lambda: machine.now)
    assert choose_workers(machine.read, torch.randperm(N), 32, batches, 4) == (taken, why)
    assert machine.now < 10  # however slow


def given(module: Any, **settings: Any) -> Any:
    """Return the module as in a fit of one process."""
    root = {"strategy": SimpleNamespace(distributed_sampler_kwargs={"num_replicas": 1, "rank": 0})}
    length = {"max_epochs": 10**9, "max_steps": -1, "current_epoch": 0, "accumulate_grad_batches": 1}
    state = SimpleNamespace(fn=settings.pop("fn", "fit"))
    limits = {"limit_train_batches": 1.0, "overfit_batches": 0, "state": state}
    module.trainer = SimpleNamespace(**root, **length, **limits, **settings)
    module.trainer.strategy.root_device = torch.device("cpu")
    return module


class Slow(Drawing):
    """A dataset whose samples take a millisecond each."""

    def __getitem__(self, row: int) -> Any:
        time.sleep(1e-3)
        return super().__getitem__(row)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A short time limit, on a machine of two cores."""
    monkeypatch.setattr(workers, "WINDOW", 0.01)
    monkeypatch.setattr(workers, "physical_cores", lambda: 2)


def dataset(**settings: Any) -> Any:
    return given(DatasetDataModule(Slow(200), batch_size=16, seed=3, **settings))


def images(**settings: Any) -> Any:
    facts = {"num_classes": 10, "channels": 1, "image_size": 8, "mean": [0.3], "std": [0.4], "batch_size": 64}
    return given(ImageDataModule(Digits(), **facts, **{"loader": "workers", "augment": None, **settings}))


def states() -> tuple[Any, ...]:
    return random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()


@pytest.mark.law2
@pytest.mark.law3
@pytest.mark.parametrize("make", [dataset, images])
def test_batches_draws_and_position_are_those_without(
    make: Any, quick: None, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "choose_workers", lambda *given: (2, choose_workers(*given)[1]))  # measures, takes two
    before, children = states(), set(active_children())
    module = make(num_workers="auto", persistent_workers=True)
    loader = module.train_dataloader()
    said = capsys.readouterr().out
    assert states() == before
    assert loader.state_dict() == {"epoch": 0, "batch": 0}
    assert said.startswith("data.num_workers=auto took 2: ")
    plain = make().train_dataloader()
    for _ in range(2):
        for ours, theirs in zip(loader, plain, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert states() == before
    module.val_dataloader()
    assert capsys.readouterr().out == ""  # measured once
    assert len(set(active_children()) - children) == 2
    module.teardown("fit")
    assert set(active_children()) <= children


# A worker process that dies, as by the OOM killer, ends the run with one message.


WAY = "Lower data.num_workers, or find the cause with data.num_workers=0."


class Ending(Dataset[int]):
    """A dataset whose process exits while it reads the third sample."""

    def __init__(self, end: Callable[[], Any]) -> None:
        self.end = end

    def __len__(self) -> int:
        return 4

    def __getitem__(self, row: int) -> int:
        if row == 2:
            self.end()
        return row


@pytest.mark.parametrize(
    ("end", "words", "stays"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "was killed by signal: Killed", True),
        (lambda: os._exit(3), "exited unexpectedly with exit code 3", False),
    ],
)
def test_a_worker_that_dies_ends_the_run_and_the_other_workers(
    end: Any, words: str, stays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A fit with workers restores at its end the handling of SIGCHLD that torch replaced.
    monkeypatch.setattr("torch.utils.data._utils.signal_handling._SIGCHLD_handler_set", False)
    children = set(active_children())
    with pytest.raises((UserError, RuntimeError)) as caught:  # torch's own if the signal arrives between two batches
        list(Reader(Ending(end), batch_size=1, num_workers=2, persistent_workers=stays))
    said = str(caught.value if isinstance(caught.value, UserError) else worker_message(caught.value))
    # torch gets the signal, unless it sees a closed queue first
    assert any(said.startswith(f"a DataLoader worker {how}; ") for how in (words, "ended unexpectedly")), said
    assert said.endswith(WAY)
    assert not [child for child in set(active_children()) - children if child.is_alive()]
