"""What the token files on disk may be: every damaged, cut or foreign one is told in a sentence."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lathe.data.token_file import HEADER, TokenFiles, TokenWriter, header, write_meta
from lathe.data.tokens import TokenDataModule
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


def test_the_header_is_numpys_for_any_count() -> None:
    for count in (0, 1, 2**40):
        assert len(header("<u4", count)) == HEADER == 128
        assert header("<u4", count).endswith(b"\n")


def test_missing_files(files: Path, tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"nothing is not there \(data\.source\.name\): write it with python scripts/prepare_tokens\.py"
    ):
        source(tmp_path / "nothing").prepare()
    (files / "val.npy").unlink()
    with pytest.raises(UserError, match=r"val\.npy is missing: write it again with"):
        source(files).prepare()
    (files / "meta.json").unlink()
    with pytest.raises(UserError, match=r"tokens holds no token files, as it has no meta\.json"):
        source(files).prepare()


@pytest.mark.parametrize("cut", [1, 99, 100, 227])
def test_a_file_that_was_cut(files: Path, cut: int) -> None:
    data = (files / "train.npy").read_bytes()
    (files / "train.npy").write_bytes(data[:-cut])
    with pytest.raises(
        UserError, match=rf"train\.npy has {228 - cut} bytes and meta\.json says 228: it was cut or changed"
    ):
        source(files).prepare()


def test_an_empty_file_and_an_empty_split(files: Path, tmp_path: Path) -> None:
    (files / "test.npy").write_bytes(b"")
    with pytest.raises(UserError, match=r"test\.npy has 0 bytes and meta\.json says 148"):
        source(files).prepare()
    with pytest.raises(UserError, match=r"val\.npy has no tokens: prepare more text"):
        source(write(tmp_path / "none", val=0)).prepare()


def test_a_foreign_array_of_the_same_size(files: Path) -> None:
    np.save(files / "train.npy", np.arange(50, dtype=np.int16))
    assert (files / "train.npy").stat().st_size == 228
    with pytest.raises(UserError, match=r"train\.npy is not the file that meta\.json describes"):
        source(files).prepare()
    np.save(files / "train.npy", np.arange(25, dtype=np.float32))
    with pytest.raises(UserError, match=r"train\.npy is not the file that meta\.json describes"):
        source(files).prepare()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "3",
        '{"format": "other"}',
        '{"format": "lathe tokens"',
        "\x00\xff",
        '{"format": "lathe tokens", "version": 1}',
    ],
)
def test_a_foreign_or_damaged_description(files: Path, text: str) -> None:
    (files / "meta.json").write_text(text, encoding="latin-1")
    with pytest.raises(UserError, match=r"meta\.json was not written by scripts/prepare_tokens\.py, or is damaged"):
        source(files).prepare()


@pytest.mark.parametrize(
    "change",
    [
        {"vocab_size": "300"},
        {"vocab_size": 0},
        {"vocab_size": True},
        {"dtype": "<u4"},
        {"dtype": "O"},
        {"splits": {}},
        {"splits": None},
        {"splits": {"train": {"tokens": -1}, "val": {"tokens": 2}, "test": {"tokens": 2}}},
    ],
)
def test_a_description_with_impossible_values(files: Path, change: dict[str, Any]) -> None:
    meta = json.loads((files / "meta.json").read_text())
    (files / "meta.json").write_text(json.dumps(meta | change))
    with pytest.raises(UserError, match=r"meta\.json was not written by scripts/prepare_tokens\.py, or is damaged"):
        source(files).prepare()


def test_another_version(files: Path) -> None:
    meta = json.loads((files / "meta.json").read_text())
    (files / "meta.json").write_text(json.dumps(meta | {"version": 2}))
    with pytest.raises(UserError, match=r"meta\.json has version 2 and this code reads version 1: write it again"):
        source(files).prepare()


def test_changed_bytes_are_found_when_asked(files: Path) -> None:
    source(files, verify=True).prepare()
    data = bytearray((files / "val.npy").read_bytes())
    data[-1] ^= 1
    (files / "val.npy").write_bytes(data)
    source(files).prepare()
    with pytest.raises(UserError, match=r"val\.npy differs from its SHA-256 in meta\.json"):
        source(files, verify=True).prepare()


def test_declared_facts_are_held_against_the_files(files: Path) -> None:
    for settings, message in (
        (
            {"vocab_size": 257, "length": 4},
            r"data\.vocab_size=257 is not what the source TokenFiles has: set data\.vocab_size=300",
        ),
        (
            {"vocab_size": 300, "length": 10},
            r"data\.length=10 needs 11 tokens and the test split has 10: choose a smaller data\.length",
        ),
    ):
        with pytest.raises(UserError, match=message):
            TokenDataModule(source(files), batch_size=2, **settings).setup()  # type: ignore[arg-type]
    TokenDataModule(source(files), vocab_size=300, length=9, batch_size=2).setup()
