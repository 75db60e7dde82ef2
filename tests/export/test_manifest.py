"""The manifest of an export: tampered files, foreign names and torn manifests are refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from lathe.errors import UserError
from lathe.export import manifest

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
    manifest.write(folder, CONTENT)
    return folder


def test_what_is_written_is_read(folder: Path) -> None:
    found = manifest.read(folder)
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
        manifest.write(folder, {**CONTENT, "loss": float("nan")})
    assert (folder / "manifest.json").read_bytes() == before
    assert len(list(folder.iterdir())) == 3


@pytest.mark.parametrize("name", ["model.onnx", "parity.json"])
def test_a_changed_file_is_refused(folder: Path, name: str) -> None:
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(UserError, match=rf"{name} is not the file that was exported, its SHA-256 differs"):
        manifest.read(folder)
    (folder / name).write_bytes(content + b" ")
    with pytest.raises(UserError, match=rf"{name} is not the file that was exported"):
        manifest.read(folder)
    (folder / name).unlink()
    with pytest.raises(UserError, match=rf"{name} is missing: export the run again"):
        manifest.read(folder)


@pytest.mark.parametrize("name", ["../model.onnx", "/etc/hostname", "a/b.onnx", "..", "", ".hidden", "a\\b", "a\n"])
def test_names_that_lead_elsewhere_are_refused(folder: Path, name: str) -> None:
    text = json.loads((folder / "manifest.json").read_text())
    text["files"][name] = text["files"]["model.onnx"]
    (folder / "manifest.json").write_text(json.dumps(text))
    with pytest.raises(UserError, match=r"names files that an export of target=onnx does not have"):
        manifest.read(folder)
    (folder / "manifest.json").write_text(json.dumps({**text, "file": name}))
    with pytest.raises(UserError, match=r"names files that an export of target=onnx does not have"):
        manifest.read(folder)


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "{}",
        "[" * 100_000,
        json.dumps({"version": 1, **CONTENT, "files": {"model.onnx": {"bytes": "x"}}}),
        json.dumps({"version": 1, **CONTENT, "preprocess": {"in_graph": False}, "files": {}}),
    ],
)
def test_a_torn_or_foreign_manifest_is_refused(folder: Path, text: str) -> None:
    (folder / "manifest.json").write_text(text, encoding="latin-1")
    with pytest.raises(UserError, match=r"manifest\.json can't be read as the manifest of an export"):
        manifest.read(folder)


def test_a_missing_export_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^target=onnx_int8: .*onnx_int8 holds no export"):
        manifest.read(tmp_path / "onnx_int8")
