"""Token files on disk: read from a memory map; damaged, truncated and foreign ones are refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lathe.data.token_file import TokenFiles, TokenWriter, write_meta
from lathe.errors import UserError


def write(folder: Path, vocab_size: int = 300, **counts: int) -> Path:
    folder.mkdir()
    splits = {}
    for number, (name, count) in enumerate({"train": 50, "val": 20, "test": 10, **counts}.items()):
        writer = TokenWriter(folder / f"{name}.npy", vocab_size)
        ids = np.random.default_rng(number).integers(vocab_size, size=count)
        writer.write(ids[:7], ends=False)
        writer.write(ids[7:], ends=True)
        splits[name] = writer.close()
    write_meta(folder, vocab_size, splits, tokenizer="test")
    return folder


@pytest.fixture
def files(tmp_path: Path) -> Path:
    return write(tmp_path / "tokens")


def source(folder: Path, **settings: Any) -> TokenFiles:
    return TokenFiles(str(folder.parent), folder.name, **settings)


@pytest.mark.parametrize(
    ("vocab_size", "dtype"), [(300, np.uint16), (2**16, np.uint16), (2**16 + 1, np.uint32), (2**32, np.uint32)]
)
def test_what_was_written_is_read_from_a_map(tmp_path: Path, vocab_size: int, dtype: type) -> None:
    found = source(write(tmp_path / "tokens", vocab_size)).load()
    for number, (name, count) in enumerate({"train": 50, "val": 20, "test": 10}.items()):
        ids = found[name].ids
        assert isinstance(ids.base, np.memmap)
        assert ids.dtype == dtype
        assert not ids.flags.writeable
        assert np.array_equal(ids, np.random.default_rng(number).integers(vocab_size, size=count))
        assert np.array_equal(ids, np.load(tmp_path / "tokens" / f"{name}.npy", allow_pickle=False))


def test_missing_files(files: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nothing is not there \(data\.source\.name\)"):
        source(tmp_path / "nothing").prepare()
    (files / "val.npy").unlink()
    with pytest.raises(UserError, match=r"val\.npy is missing"):
        source(files).prepare()


@pytest.mark.parametrize("cut", [1, 100, 228])
def test_a_file_that_was_cut_is_refused(files: Path, cut: int) -> None:
    data = (files / "train.npy").read_bytes()
    (files / "train.npy").write_bytes(data[:-cut])
    with pytest.raises(UserError, match=rf"train\.npy has {228 - cut} bytes and meta\.json says 228"):
        source(files).prepare()


def test_an_empty_split_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"val\.npy has no tokens"):
        source(write(tmp_path / "none", val=0)).prepare()


def test_another_array_of_the_same_size_is_refused(files: Path) -> None:
    np.save(files / "train.npy", np.arange(50, dtype=np.int16))
    assert (files / "train.npy").stat().st_size == 228
    with pytest.raises(UserError, match=r"train\.npy is not the file that meta\.json describes"):
        source(files).prepare()


@pytest.mark.parametrize("change", [{"format": "other"}, {"vocab_size": "300"}, {"dtype": "O"}, {"splits": {}}])
def test_a_damaged_description_is_refused(files: Path, change: dict[str, Any]) -> None:
    meta = json.loads((files / "meta.json").read_text())
    (files / "meta.json").write_text(json.dumps(meta | change))
    with pytest.raises(UserError, match=r"meta\.json was not written by scripts/prepare_tokens\.py, or is damaged"):
        source(files).prepare()


def test_changed_bytes_are_found_when_asked(files: Path) -> None:
    source(files, verify=True).prepare()
    data = bytearray((files / "val.npy").read_bytes())
    data[-1] ^= 1
    (files / "val.npy").write_bytes(data)
    source(files).prepare()
    with pytest.raises(UserError, match=r"val\.npy differs from its SHA-256 in meta\.json"):
        source(files, verify=True).prepare()
