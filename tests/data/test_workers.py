"""The number of processes that read changes no batch and no random state; one that dies ends the run."""

import os
import random
import signal
from collections.abc import Callable
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.own_datasets import Drawing
from support.shards import write
from torch.utils.data import Dataset

from lathe.data import DatasetDataModule, Digits, ImageDataModule, ShardDataModule, Shards, shards
from lathe.data.order import Reader
from lathe.errors import UserError, worker_message

FACTS: dict[str, Any] = {"num_classes": 10, "channels": 1, "image_size": 8, "mean": [0.3], "std": [0.4]}


def dataset(**settings: Any) -> Any:
    return DatasetDataModule(Drawing(200), batch_size=16, seed=3, **settings)


def images(**settings: Any) -> Any:
    return ImageDataModule(Digits(), **FACTS, batch_size=64, loader="workers", **settings)


def states() -> tuple[Any, ...]:
    return random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()


@pytest.mark.law2
@pytest.mark.law3
@pytest.mark.parametrize("make", [dataset, images])
def test_batches_draws_and_position_are_those_without(make: Any) -> None:
    before, children = states(), set(active_children())
    module = make(num_workers=2, persistent_workers=True)
    loader, plain = module.train_dataloader(), make().train_dataloader()
    for _ in range(2):
        for ours, theirs in zip(loader, plain, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
            assert loader.state_dict() == plain.state_dict()
    assert states() == before
    assert len(set(active_children()) - children) == 2
    module.teardown("fit")
    assert set(active_children()) <= children


def test_the_default_is_four_or_one_per_core_for_shards_and_none_for_other_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "physical_cores", lambda: 64)
    source = Shards("", str(write(tmp_path / "set", (1, 8, 8))))
    facts = FACTS | {"num_classes": 5, "batch_size": 10}
    assert ShardDataModule(source, **facts, loader="workers").reader["num_workers"] == 4
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "64")
    assert ShardDataModule(source, **facts, loader="workers").reader["num_workers"] == 1
    assert ShardDataModule(source, **facts, loader="workers", num_workers=0).reader["num_workers"] == 0
    assert images().reader["num_workers"] == dataset().options["num_workers"] == 0


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
