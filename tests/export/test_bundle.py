"""The folder of an export: whole or absent however the process ends, and refused after tampering."""

import errno
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from lathe.errors import UserError
from lathe.export.bundle import fresh_folder, read_manifest, whole, write_manifest


def test_a_link_is_written_where_it_leads(tmp_path: Path) -> None:
    (tmp_path / "kept.csv").write_bytes(b"old")
    (tmp_path / "link.csv").symlink_to("kept.csv")
    with whole(tmp_path / "link.csv") as temporary:
        temporary.write_bytes(b"new")
    assert (tmp_path / "link.csv").is_symlink()
    assert (tmp_path / "kept.csv").read_bytes() == b"new"
    assert sorted(os.listdir(tmp_path)) == ["kept.csv", "link.csv"]


def test_a_file_is_whole_or_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "net.onnx"
    with whole(path) as temporary:
        assert temporary.suffix == ".onnx"
        temporary.write_bytes(b"old")
        assert not path.exists()

    def half_way() -> None:
        with whole(path) as temporary:
            temporary.write_bytes(b"ne")
            raise RuntimeError("half way")

    with pytest.raises(RuntimeError, match="half way"):
        half_way()
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["net.onnx"]


def test_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"net\.onnx can't be written, the disk is full"), whole(tmp_path / "net.onnx"):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert os.listdir(tmp_path) == []


def write(path: Path, text: str) -> None:
    with fresh_folder(path) as folder:
        (folder / "manifest.json").write_text(text)
        assert not (path / "manifest.json").exists() or (path / "manifest.json").read_text() != text


def test_a_folder_takes_the_place_of_the_earlier_one(tmp_path: Path) -> None:
    path = tmp_path / "exports" / "onnx"
    write(path, "first")
    (path / "more").write_text("only of the first")
    write(path, "second")
    assert (path / "manifest.json").read_text() == "second"
    assert os.listdir(path) == ["manifest.json"]
    assert os.listdir(path.parent) == ["onnx"]


def test_a_folder_that_is_not_an_export_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "onnx"
    path.mkdir()
    write(path, "in an empty folder")
    (path / "manifest.json").rename(path / "mine.txt")
    with pytest.raises(UserError, match=r"onnx is there, and no export that Lathe has written: move it elsewhere\.$"):
        write(path, "again")
    assert os.listdir(path) == ["mine.txt"]


def fail(path: Path, error: BaseException) -> None:
    with fresh_folder(path) as folder:
        (folder / "manifest.json").write_text("half")
        raise error


@pytest.mark.parametrize("error", [RuntimeError("x"), KeyboardInterrupt()])
def test_nothing_is_left_after_an_error(tmp_path: Path, error: BaseException) -> None:
    path = tmp_path / "exports" / "onnx"
    with pytest.raises(type(error)):
        fail(path, error)
    assert list(tmp_path.iterdir()) == []
    write(path, "first")
    with pytest.raises(type(error)):
        fail(path, error)
    assert (path / "manifest.json").read_text() == "first"
    assert os.listdir(path.parent) == ["onnx"]


def test_a_full_disk_keeps_the_earlier_export(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(disk)], capture_output=True).returncode:
        pytest.skip("needs the right to mount a file system")
    try:
        write(disk / "exports" / "onnx", "small")
        with pytest.raises(UserError, match=r"can't be written, the disk is full: free some space\.$"):
            write(disk / "exports" / "onnx", "x" * 2**20)
        assert (disk / "exports" / "onnx" / "manifest.json").read_text() == "small"
        assert os.listdir(disk / "exports") == ["onnx"]
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def test_another_process_may_put_its_own_there_meanwhile(tmp_path: Path) -> None:
    path = tmp_path / "onnx"
    with fresh_folder(path) as folder:
        (folder / "manifest.json").write_text("ours")
        path.mkdir()
        (path / "manifest.json").write_text("theirs")
    assert (path / "manifest.json").read_text() == "ours"
    assert os.listdir(tmp_path) == ["onnx"]


CONTENT: dict[str, Any] = {
    "target": "onnx",
    "file": "model.onnx",
    "input": {"name": "input", "dtype": "uint8", "shape": ["batch", 1, 8, 8]},
    "output": {"name": "output", "dtype": "float32", "shape": ["batch", 10]},
    "preprocess": {"in_graph": True, "mean": [0.5], "std": [0.25], "size": [8, 8]},
    "classes": ["a", "b"],
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "onnx"
    folder.mkdir()
    (folder / "model.onnx").write_bytes(b"graph")
    (folder / "parity.json").write_text("{}")
    write_manifest(folder, CONTENT)
    return folder


def test_what_is_written_is_read(folder: Path) -> None:
    found = read_manifest(folder)
    assert {key: found[key] for key in CONTENT} == CONTENT
    assert found["version"] == 1
    assert found["files"]["model.onnx"] == {
        "bytes": 5,
        "sha256": "eef93e1d14482804277fca0172464032d1a4fdbcc338524059fa1e861454ad4d",
    }
    assert sorted(path.name for path in folder.iterdir()) == ["manifest.json", "model.onnx", "parity.json"]


def test_a_value_that_json_lacks_is_refused_before_anything_is_written(folder: Path) -> None:
    before = (folder / "manifest.json").read_bytes()
    with pytest.raises(ValueError, match="JSON"):
        write_manifest(folder, {**CONTENT, "loss": float("nan")})
    assert (folder / "manifest.json").read_bytes() == before
    assert len(list(folder.iterdir())) == 3


@pytest.mark.parametrize("name", ["model.onnx", "parity.json"])
def test_a_changed_file_is_refused(folder: Path, name: str) -> None:
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(UserError, match=rf"{name} is not the file that was exported, its SHA-256 differs"):
        read_manifest(folder)
    (folder / name).write_bytes(content + b" ")
    with pytest.raises(UserError, match=rf"{name} is not the file that was exported"):
        read_manifest(folder)
    (folder / name).unlink()
    with pytest.raises(UserError, match=rf"{name} is missing: export the run again"):
        read_manifest(folder)


@pytest.mark.parametrize("name", ["../model.onnx", "/etc/hostname", "a/b.onnx", "..", "", ".hidden", "a\\b", "a\n"])
def test_names_that_lead_elsewhere_are_refused(folder: Path, name: str) -> None:
    text = json.loads((folder / "manifest.json").read_text())
    text["files"][name] = text["files"]["model.onnx"]
    (folder / "manifest.json").write_text(json.dumps(text))
    with pytest.raises(UserError, match=r"names files that an export of target=onnx does not have"):
        read_manifest(folder)
    (folder / "manifest.json").write_text(json.dumps({**text, "file": name}))
    with pytest.raises(UserError, match=r"names files that an export of target=onnx does not have"):
        read_manifest(folder)


def test_a_missing_export_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^target=onnx_int8: .*onnx_int8 holds no export"):
        read_manifest(tmp_path / "onnx_int8")
