"""Shards: random access, refused if damaged; devices, interruptions and open files change nothing."""

import os
import pickle
import tracemalloc
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.shards import EVERYTHING, loader, pixels, split, write

from lathe.data import shards as module
from lathe.data.loader import ResidentLoader
from lathe.data.normalize import Normalizer
from lathe.data.random import epoch_permutation
from lathe.data.shard_index import read_index
from lathe.data.shards import ShardDataModule, ShardImages, ShardLoader, Shards, window_order
from lathe.errors import UserError

pytestmark = pytest.mark.law2


@pytest.fixture(params=["png", "npy"])
def folder(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """50 training images of 3 x 8 x 8 pixels in 5 classes, 8 in a shard: 7 training shards."""
    return write(tmp_path / "set", encoding=request.param)


@pytest.fixture
def npy(tmp_path: Path) -> Path:
    return write(tmp_path / "set", encoding="npy")


def same(left: list[Any], right: list[Any]) -> bool:
    return all(torch.equal(a, b) for x, y in zip(left, right, strict=True) for a, b in zip(x, y, strict=True))


def test_what_is_read_is_what_was_written(folder: Path) -> None:
    splits = Shards("", str(folder), verify=True)
    splits.prepare()
    for name, (images, labels) in pixels().items():
        read = getattr(splits.load(), name).read()
        assert np.array_equal(read[0], images)
        assert np.array_equal(read[1], labels)
    index = read_index(folder, "key")
    assert [shard["samples"] for shard in index["splits"]["train"]["shards"]] == [8] * 6 + [2]
    assert (index["num_classes"], index["image"]) == (5, [3, 8, 8])
    train = pixels()["train"][0] / 255
    assert index["mean"] == pytest.approx(train.mean((0, 2, 3)), abs=1e-4)
    assert index["std"] == pytest.approx(train.std((0, 2, 3)), abs=1e-4)


def test_any_rows_in_any_order(folder: Path) -> None:
    images = split(folder).images
    rows = np.array([49, 0, 17, 0, 8, 7])
    assert np.array_equal(images[rows], pixels()["train"][0][rows])
    again = pickle.loads(pickle.dumps(images))  # as in a worker that was not forked
    assert np.array_equal(again[rows], images[rows])


def test_a_window_of_all_shards_is_the_order_of_data_in_memory(folder: Path) -> None:
    images, labels = (torch.from_numpy(part) for part in pixels()["train"])
    normalizer = Normalizer((0.4, 0.5, 0.6), (0.2, 0.25, 0.3), 3)
    resident = ResidentLoader(
        images,
        labels,
        num_classes=5,
        normalizer=normalizer,
        augment=EVERYTHING,
        device=torch.device("cpu"),
        train=True,
        batch_size=12,
    )
    streamed = loader(folder, window=7)
    for _ in range(2):
        assert same(list(resident), list(streamed))


def test_a_window_mixes_its_own_shards_only() -> None:
    sizes = np.array([8, 8, 8, 8, 8, 8, 2])
    shard = np.repeat(np.arange(7), sizes)
    orders = [window_order(0, epoch, sizes, 3) for epoch in range(3)]
    for order in orders:
        assert sorted(order.tolist()) == list(range(50))
        seen = shard[order]
        seams = [place for place in range(51) if not set(seen[:place]) & set(seen[place:])]
        assert [len(set(seen[left:right])) for left, right in pairwise(seams)] == [3, 3, 1]
    assert not torch.equal(orders[0], orders[1])
    assert torch.equal(orders[2], window_order(0, 2, sizes, 3))
    assert torch.equal(window_order(5, 1, sizes, 9), epoch_permutation(5, 1, 50))


@pytest.mark.parametrize("window", [1, 3, 7])
@pytest.mark.parametrize("world", [2, 3])
def test_ranks_together_see_the_batches_of_one_process(npy: Path, world: int, window: int) -> None:
    one = loader(npy, window)
    ranks = [loader(npy, window, rank=rank, world_size=world) for rank in range(world)]
    for _ in range(2):
        joined = [tuple(torch.cat(column) for column in zip(*parts, strict=True)) for parts in zip(*ranks, strict=True)]
        assert same(joined, list(one))


@pytest.mark.parametrize("world", [1, 2, 3])
def test_evaluation_counts_every_image_once(npy: Path, world: int) -> None:
    plain = {"train": False, "augment": None, "normalizer": None, "batch_size": 7, "world_size": world}
    ranks = [loader(npy, rank=rank, **plain) for rank in range(world)]
    assert len({len(list(rank)) for rank in ranks}) == 1
    images = torch.cat([x[y != -100] for parts in zip(*ranks, strict=True) for x, y in parts])
    assert np.array_equal(images.numpy(), pixels()["train"][0])


@pytest.mark.parametrize("interrupted", [0, 1, 3, 4, 6])
def test_resume_continues_with_the_next_batch_and_reads_nothing_twice(
    npy: Path, interrupted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = [batch for feed in [loader(npy)] for _ in range(2) for batch in feed]
    first, second = loader(npy), loader(npy)
    head = list(islice((batch for _ in range(2) for batch in first), interrupted))
    second.load_state_dict(first.state_dict())
    reads = count_reads(monkeypatch)
    tail = list(islice((batch for _ in range(3) for batch in second), len(whole) - interrupted))
    assert same(head + tail, whole)
    assert len(reads) == 12 * (len(whole) - interrupted)


def count_reads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Record (shard, first byte) of each image that is read from here."""
    read, noted = ShardImages._read, []

    def note(self: ShardImages, shard: int, start: int, size: int) -> Any:
        noted.append((shard, start))
        return read(self, shard, start, size)

    monkeypatch.setattr(ShardImages, "_read", note)
    return noted


def test_ranks_read_their_own_images_only(npy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = count_reads(monkeypatch)
    parts = []
    for rank in range(2):
        list(loader(npy, rank=rank, world_size=2, augment=None))
        parts.append(set(reads))
        reads.clear()
    assert [len(part) for part in parts] == [24, 24]
    assert not parts[0] & parts[1]


def test_workers_give_the_same_batches_and_an_undisturbed_state(npy: Path) -> None:
    here, workers = loader(npy), loader(npy, num_workers=2, prefetch_factor=2, persistent_workers=True)
    for ours, theirs in zip(here, workers, strict=True):
        assert same([ours], [theirs])
        assert here.state_dict() == workers.state_dict()


def test_memory_and_open_files_do_not_grow_with_the_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """50 images of 48 kB in 7 shards, with a window of 2: few images in memory, each shard opened once."""
    path = write(tmp_path / "set", (3, 128, 128), encoding="npy")
    train, opened = split(path, max_open=2), []
    images: Any = train.images
    monkeypatch.setattr(module.os, "open", lambda name, flags, real=os.open: opened.append(name) or real(name, flags))
    plain: dict[str, Any] = {"num_classes": 5, "normalizer": None, "augment": None, "device": torch.device("cpu")}
    feed = ShardLoader(train, images.sizes, 2, **plain, train=True, batch_size=2)
    tracemalloc.start()
    most = max(images.open_shards for _ in feed)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (most, len(opened)) == (2, 7)
    assert peak < 10 * 48 * 1024
    images.close()
    assert images.open_shards == 0


@pytest.mark.parametrize("kind", ["workers", "resident"])
def test_the_data_module_gives_all_splits(npy: Path, kind: Any) -> None:
    facts: dict[str, Any] = {"num_classes": 5, "channels": 3, "image_size": 8, "mean": [0.5] * 3, "std": [0.3] * 3}
    data = ShardDataModule(Shards("", str(npy)), window=2, **facts, batch_size=10, loader=kind)
    data.prepare_data()
    data.setup("fit")
    assert len(data.train_dataloader()) == 5
    assert sum(int((y != -100).sum()) for _, y in data.val_dataloader()) == 9
    with pytest.raises(UserError, match=r"data\.num_classes=6"):
        ShardDataModule(Shards("", str(npy)), **(facts | {"num_classes": 6}), batch_size=10).setup()


def test_grey_images_keep_their_pixels(tmp_path: Path) -> None:
    path = write(tmp_path / "grey", (1, 6, 4))
    assert np.array_equal(split(path).read()[0], pixels((1, 6, 4))["train"][0])
