"""data.num_workers=auto takes the fastest number of workers and changes no batch."""

import math
import random
import time
from collections.abc import Iterable, Iterator
from multiprocessing import active_children
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.own_datasets import Drawing, Pictures

from lathe.data import DatasetDataModule, Digits, ImageDataModule, workers
from lathe.data.workers import quickest

N = 1000


class Machine:
    """A simulated clock. A sample takes `seconds`, up to `cores` workers read in parallel after
    `start` seconds each.
    """

    def __init__(self, seconds: float = 0.001, cores: int = 1, start: float = 0.0, fails: int | None = None) -> None:
        self.seconds, self.cores, self.start, self.fails = seconds, cores, start, fails
        self.now, self.tried, self.samples = 0.0, list[int](), list[int]()

    def read(self, count: int, lists: Iterable[list[int]]) -> Iterator[list[int]]:
        self.tried += [count] * (self.tried[-1:] != [count])
        self.now += self.start * count
        if count == self.fails:
            raise RuntimeError("a worker was killed")
        for samples in lists:
            self.samples += samples
            self.now += self.seconds * len(samples) / max(1, min(count, self.cores))
            yield samples


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    def has(**settings: Any) -> Machine:
        made = Machine(**settings)
        monkeypatch.setattr(workers, "perf_counter", lambda: made.now)
        return made

    return has


@pytest.mark.parametrize(
    ("has", "batches", "most", "taken", "why", "tried"),
    [
        ({"cores": 4}, math.inf, 16, 4, "batches/s are 31 with 0, 31 with 1, 62 with 2, 125 with 4, 125 with 8", 8),
        ({"cores": 1}, math.inf, 8, 0, "batches/s are 31 with 0, 31 with 1, 31 with 2", 2),
        ({"cores": 8}, 50, 8, 0, "reading the 50 batches ahead takes 1.6 s", 0),
        ({"cores": 2, "start": 0.2}, 200, 2, 2, "batches/s are 31 with 0, 31 with 1, 62 with 2", 2),
        ({"cores": 4, "seconds": 0.5}, 200, 8, 8, "a sample takes 0.5 s to read", 0),
        ({"cores": 4, "fails": 2}, 200, 8, 0, "batches/s are 31 with 0, 31 with 1; reading with 2 failed (Runtime", 2),
    ],
)
def test_the_fewest_that_are_quickest_beyond_noise(
    machine: Any, has: dict[str, Any], batches: float, most: int, taken: int, why: str, tried: int
) -> None:
    here = machine(**has)
    found = quickest(here.read, torch.randperm(N), 32, batches, most)
    assert (found[0], found[1][: len(why)], here.tried[-1]) == (taken, why, tried)
    assert here.now < workers.SECONDS + 2.5  # however slow
    assert len(set(here.samples[:N])) == len(here.samples[:N])  # each trial reads other samples, until none are left


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
    monkeypatch.setattr(workers, "quickest", lambda *given: (2, quickest(*given)[1]))  # it measures, and takes two
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


def test_a_fit_measures_what_it_trains_on(quick: None, capsys: pytest.CaptureFixture) -> None:
    held_out = Pictures(20)
    module = dataset(val=held_out, test=Pictures(20), num_workers="auto")
    module.setup("fit")
    read = held_out.read
    module.val_dataloader()  # the sanity check comes first
    assert capsys.readouterr().out.startswith("data.num_workers=auto took ")
    assert held_out.read == read
