"""Shards: random access, refused if damaged; devices, interruptions and open files change nothing."""

import pickle
import tracemalloc
from collections.abc import Callable
from contextlib import ExitStack
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.shards import EVERYTHING, loader, pixels, split, write

from lathe.data.augment import Normalizer
from lathe.data.loader import ResidentLoader
from lathe.data.random import epoch_permutation
from lathe.data.shards import (
    ShardDataModule,
    ShardImages,
    ShardLoader,
    Shards,
    read_index,
    window_order,
)
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
    rows = np.array([49, 0, 17, 0, 8, 7])
    again = pickle.loads(pickle.dumps(split(folder).images))  # as in a worker that was not forked
    assert np.array_equal(again[rows], pixels()["train"][0][rows])
    index = read_index(folder)
    assert [shard["samples"] for shard in index["splits"]["train"]["shards"]] == [8] * 6 + [2]
    assert (index["num_classes"], index["image"]) == (5, [3, 8, 8])
    train = pixels()["train"][0] / 255
    assert index["mean"] == pytest.approx(train.mean((0, 2, 3)), abs=1e-4)
    assert index["std"] == pytest.approx(train.std((0, 2, 3)), abs=1e-4)


def test_a_window_of_all_shards_is_the_order_of_data_in_memory(folder: Path) -> None:
    images, labels = (torch.from_numpy(part) for part in pixels()["train"])
    settings: dict[str, Any] = {"num_classes": 5, "augment": EVERYTHING, "device": torch.device("cpu")}
    normalizer = Normalizer((0.4, 0.5, 0.6), (0.2, 0.25, 0.3), 3)
    resident = ResidentLoader(images, labels, normalizer=normalizer, train=True, batch_size=12, **settings)
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


def test_ranks_together_see_the_batches_of_one_process(npy: Path) -> None:
    one, ranks = loader(npy, 3), [loader(npy, 3, rank=rank, world_size=2) for rank in range(2)]
    for _ in range(2):
        joined = [tuple(torch.cat(column) for column in zip(*parts, strict=True)) for parts in zip(*ranks, strict=True)]
        assert same(joined, list(one))


@pytest.mark.parametrize("interrupted", [1, 6])
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


def test_memory_and_open_files_do_not_grow_with_the_data(tmp_path: Path) -> None:
    """50 images of 48 kB in 7 shards, with a window of 2: few images in memory, each shard mapped once."""
    path = write(tmp_path / "set", (3, 128, 128), encoding="npy")
    train = split(path, max_open=2)
    images: Any = train.images
    plain: dict[str, Any] = {"num_classes": 5, "normalizer": None, "augment": None, "device": torch.device("cpu")}
    feed = ShardLoader(train, images.sizes, 2, **plain, train=True, batch_size=2)
    tracemalloc.start()
    most = max(images._open.cache_info().currsize for _ in feed)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (most, images._open.cache_info().misses) == (2, 7)
    assert peak < 10 * 48 * 1024


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


# Shards that are truncated, changed, missing or hostile are refused, before training if possible.


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[600] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("file", "harm", "verify", "says"),
    [
        ("train-000003.tar", cut, False, r"train-000003\.tar was cut or changed"),
        ("train-000003.tar", Path.unlink, False, r"train-000003\.tar is missing"),
        ("val.index.npy", cut, False, r"val\.index\.npy was cut or changed"),
        ("test-000000.tar", flip, True, r"test-000000\.tar was cut or changed"),
        ("index.json", cut, False, r"index\.json is not version 1"),
    ],
)
def test_damage_is_named_before_training(
    npy: Path, file: str, harm: Callable[[Path], Any], verify: bool, says: str
) -> None:
    harm(npy / file)
    with pytest.raises(UserError, match=says):
        Shards("", str(npy), verify=verify).prepare()
    if not verify:
        with pytest.raises(UserError, match=says):
            Shards("", str(npy)).load()


def test_a_pickle_in_a_shard_is_not_obeyed(npy: Path, malicious_pickle: tuple[bytes, Path]) -> None:
    """Neither in a member's bytes nor in an array of objects."""
    payload, obeyed = malicious_pickle
    images: Any = split(npy).images
    shard, start, size, _ = images.table[0]
    data = bytearray(images.paths[shard].read_bytes())
    spoilt = (
        np.lib.format.magic(1, 0)
        + b"\x76\x00{'descr': '|O', 'fortran_order': False, 'shape': (1,), }".ljust(120)
        + payload
    )
    for harm in (payload, spoilt):
        data[start : start + size] = harm.ljust(size, b"\0")[:size]
        images.paths[shard].write_bytes(data)
        with pytest.raises(UserError, match="has no image at byte"):
            split(npy).images[np.array([0])]
    assert not obeyed.exists()


# Writing shards: atomic, from folders of images and tar files of other tools, readable by webdataset.


def test_webdataset_reads_the_same_samples(tmp_path: Path) -> None:
    import webdataset

    path = write(tmp_path / "set")
    with ExitStack() as stack:  # given only names, webdataset leaves its files to the garbage collector
        names = [path / f"train-{number:06d}.tar" for number in range(7)]
        sources = [{"url": str(name), "stream": stack.enter_context(open(name, "rb"))} for name in names]
        samples = webdataset.tariterators.group_by_keys(webdataset.tariterators.tar_file_expander(sources))
        read = list(webdataset.to_tuple("png", "cls")(webdataset.decode("rgb8")(samples)))
    images, labels = pixels()["train"]
    assert np.array_equal(np.stack([image for image, _ in read]).transpose(0, 3, 1, 2), images)
    assert [label for _, label in read] == labels.tolist()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"shape": (4, 8, 8)}, r"encoding=png takes 1 or 3 channels and the images have 4"),
        ({"num_classes": 3}, r"image \d+ of train has the class \d, but there are 3"),
    ],
)
def test_what_cannot_be_written_leaves_nothing(tmp_path: Path, settings: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        write(tmp_path / "set", **settings)
    assert list(tmp_path.iterdir()) == []


def test_shards_are_replaced_only_if_asked_and_nothing_else_ever_is(npy: Path) -> None:
    with pytest.raises(UserError, match=r"is there already: .*overwrite=true"):
        write(npy)
    write(npy, shard_size=25, overwrite=True)
    assert len(list(npy.glob("train-*.tar"))) == 2
    (npy / "index.json").unlink()
    with pytest.raises(UserError, match="it holds no shards"):
        write(npy, overwrite=True)
