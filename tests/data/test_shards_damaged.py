"""Shards that are truncated, changed, missing or hostile are refused, before training if possible."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.shards import split, write

from lathe.data.shards import Shards
from lathe.errors import UserError


@pytest.fixture
def npy(tmp_path: Path) -> Path:
    return write(tmp_path / "set", encoding="npy")


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[600] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("file", "harm", "verify", "says"),
    [
        (
            "train-000003.tar",
            cut,
            False,
            r"train-000003\.tar has \d+ bytes",
        ),
        ("train-000003.tar", Path.unlink, False, r"train-000003\.tar is missing, but index\.json names it"),
        ("val.index.npy", cut, False, r"val\.index\.npy has \d+ bytes and index\.json says"),
        ("test-000000.tar", flip, True, r"test-000000\.tar differs from its SHA-256"),
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


def test_a_shard_of_another_content_and_equal_size_is_found_when_it_is_read(npy: Path) -> None:
    shard = npy / "train-000000.tar"
    shard.write_bytes(b"x" * shard.stat().st_size)
    with pytest.raises(UserError, match=r"train-000000\.tar has no image at byte \d+.*data\.source\.verify=true"):
        split(npy).read()


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
