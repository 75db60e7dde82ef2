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


def test_a_file_is_whole_or_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "net.onnx"
    with pytest.raises(UserError, match=r"net\.onnx can't be written, the disk is full"), whole(path):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert os.listdir(tmp_path) == []
    with whole(path) as temporary:
        assert temporary.suffix == ".onnx"
        temporary.write_bytes(b"old")
        assert not path.exists()
    with pytest.raises(RuntimeError, match="half way"), whole(path) as temporary:
        raise RuntimeError(f"half way, after {temporary.write_bytes(b'ne')} bytes")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["net.onnx"]


def write(path: Path, text: str, error: BaseException | None = None) -> None:
    with fresh_folder(path) as folder:
        (folder / "manifest.json").write_text(text)
        assert not (path / "manifest.json").exists() or (path / "manifest.json").read_text() != text
        if error is not None:
            raise error


def test_a_folder_replaces_an_earlier_export_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "exports" / "onnx"
    write(path, "first")
    (path / "more").write_text("only of the first")
    write(path, "second")
    assert (path / "manifest.json").read_text() == "second"
    assert os.listdir(path) == ["manifest.json"]
    assert os.listdir(path.parent) == ["onnx"]
    (path / "manifest.json").rename(path / "mine.txt")
    with pytest.raises(UserError, match=r"onnx is there, and no export that Lathe has written: move it elsewhere\.$"):
        write(path, "third")
    assert os.listdir(path) == ["mine.txt"]


@pytest.mark.parametrize("error", [RuntimeError("x"), KeyboardInterrupt()])
def test_nothing_is_left_after_an_error(tmp_path: Path, error: BaseException) -> None:
    path = tmp_path / "exports" / "onnx"
    with pytest.raises(type(error)):
        write(path, "half", error)
    assert list(tmp_path.iterdir()) == []
    write(path, "first")
    with pytest.raises(type(error)):
        write(path, "half", error)
    assert (path / "manifest.json").read_text() == "first"
    assert os.listdir(path.parent) == ["onnx"]


def test_a_full_disk_keeps_the_earlier_export(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(disk)], capture_output=True).returncode:
        pytest.skip("needs the right to mount a file system")
    full = pytest.raises(UserError, match=r"can't be written, the disk is full: free some space\.$")
    try:
        write(disk / "exports" / "onnx", "small")
        with full:
            write(disk / "exports" / "onnx", "x" * 2**20)
        with full:  # of an exporter, without the number of the error
            write(disk / "exports" / "onnx", "half", RuntimeError("bad file"))
        assert (disk / "exports" / "onnx" / "manifest.json").read_text() == "small"
        assert os.listdir(disk / "exports") == ["onnx"]
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


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
    digest = "eef93e1d14482804277fca0172464032d1a4fdbcc338524059fa1e861454ad4d"
    assert found["files"]["model.onnx"] == {"bytes": 5, "sha256": digest}
    assert sorted(path.name for path in folder.iterdir()) == ["manifest.json", "model.onnx", "parity.json"]
    with pytest.raises(UserError, match=r"^target=onnx_int8: .*onnx_int8 holds no export"):
        read_manifest(folder.with_name("onnx_int8"))


@pytest.mark.parametrize("name", ["model.onnx", "parity.json"])
def test_a_changed_file_is_refused(folder: Path, name: str) -> None:
    content = (folder / name).read_bytes()
    for changed in (content[:-1] + bytes([content[-1] ^ 1]), content + b" "):
        (folder / name).write_bytes(changed)
        with pytest.raises(UserError, match=rf"{name} is not the file that was exported, its SHA-256 differs"):
            read_manifest(folder)
    (folder / name).unlink()
    with pytest.raises(UserError, match=rf"{name} is missing: export the run again"):
        read_manifest(folder)


@pytest.mark.parametrize("name", ["../model.onnx", "/etc/hostname", "..", "", "a\n"])
def test_names_that_lead_elsewhere_are_refused(folder: Path, name: str) -> None:
    text = json.loads((folder / "manifest.json").read_text())
    for change in ({"files": {**text["files"], name: text["files"]["model.onnx"]}}, {"file": name}):
        (folder / "manifest.json").write_text(json.dumps({**text, **change}))
        with pytest.raises(UserError, match=r"names files that an export of target=onnx does not have"):
            read_manifest(folder)
