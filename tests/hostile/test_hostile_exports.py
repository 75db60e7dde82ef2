"""Foreign exports: a manifest that fits, next to a file that is an attack."""

import io
import json
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.hostile_runs import CANARY, OPEN, edit_json, said
from torch import nn

from lathe import trust
from lathe.contrib.torchserve import sources
from lathe.export import get
from lathe.export.bundle import open_bundle, write_manifest

CONTENT = {
    "classes": None,
    "preprocess": None,
    "input": {"dtype": "float32", "shape": ["batch", 4]},
    "output": {"shape": ["batch", 2]},
}
Members = dict[str, bytes]


def bundle(folder: Path, target: str, data: bytes, made: bool = False) -> Path:
    """An export of `data`, with a manifest as a stranger writes it: his hashes are right, his mark is not ours."""
    folder = folder / target
    folder.mkdir(exist_ok=True)
    name = f"model{get(target).suffix}"
    (folder / name).write_bytes(data)
    write_manifest(folder, {"target": target, "file": name, **CONTENT})
    if not made:
        edit_json(folder / "manifest.json", lambda content: content.update(made="0" * 64))
    return folder


def refused(folder: Path) -> str:
    """The one sentence that opening the export ends with."""
    return said(lambda: open_bundle(folder))


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Exports of a small net by target."""
    folder, net, found = tmp_path_factory.mktemp("good"), nn.Sequential(nn.Linear(4, 2), nn.ReLU()).eval(), {}
    for target in ("torch_export", "safetensors", "weights"):
        path = folder / f"model{get(target).suffix}"
        get(target).export(net, torch.zeros(2, 4), path)
        found[target] = path.read_bytes()
    return found


def zipped(data: bytes, change: Callable[[Members], Any]) -> bytes:
    """A zip file with other members."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    change(members)
    return packed(members)


def packed(members: Members) -> bytes:
    sink = io.BytesIO()
    with zipfile.ZipFile(sink, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return sink.getvalue()


def replaced(end: str, old: bytes, new: bytes) -> Callable[[Members], None]:
    def change(members: Members) -> None:
        (name,) = [name for name in members if name.endswith(end)]
        assert old in members[name]
        members[name] = members[name].replace(old, new)

    return change


PT2: dict[str, Callable[[Members], Any]] = {
    "a pickle of samples": lambda members: members.update({"archive/data/sample_inputs/model.pt": OPEN}),
    "a pickle of weights": replaced("model_weights_config.json", b'"use_pickle": false', b'"use_pickle": true'),
    "an object": lambda members: members.update({"archive/data/constants/opaque_obj_0": OPEN}),
    "a member twice": lambda members: members.update({"archive/MODELS/model.json": b"{}"}),
    "a call of Python": replaced("models/model.json", b"torch.ops.aten.relu.default", b"torch.os.system"),
    "a size that is code": replaced("models/model.json", b"Symbol('", b"exec('"),
    "machine code": lambda members: members.update({"archive/data/aotinductor/model/model.so": b"\x7fELF"}),
    "a path out of it": lambda members: members.update({"archive/../../../" + CANARY: b"x"}),
    "deep JSON": lambda members: members.update({"archive/models/model.json": b"[" * 100_000}),
}


@pytest.mark.parametrize("attack", PT2)
def test_pt2(attack: str, programs: dict[str, bytes], tmp_path: Path) -> None:
    assert "export the run again" in refused(
        bundle(tmp_path, "torch_export", zipped(programs["torch_export"], PT2[attack]))
    )


def test_the_program_itself_runs(programs: dict[str, bytes], tmp_path: Path) -> None:
    assert open_bundle(bundle(tmp_path, "torch_export", programs["torch_export"]))(
        np.zeros((3, 4), np.float32)
    ).shape == (3, 2)


MAR: dict[str, Callable[[Members], Any]] = {
    "another handler": lambda members: members.update({next(iter(sources())): f"open({CANARY!r}, 'w')".encode()}),
    "a payload elsewhere": lambda members: members.update(
        {"facts.json": b'{"payload": {"kind": "onnx", "file": "../../model.onnx"}}'}
    ),
}


def mar(change: Callable[[Members], Any]) -> bytes:
    members = {name: text.encode() for name, text in sources().items()}
    members |= {"facts.json": b'{"payload": {"kind": "onnx", "file": "model.onnx"}}', "model.onnx": b"x"}
    change(members)
    return packed(members)


@pytest.mark.parametrize("attack", MAR)
def test_mar(attack: str, tmp_path: Path) -> None:
    trust.allow({"trusted": ["torchserve"]})  # even then
    refused(bundle(tmp_path, "torchserve", mar(MAR[attack])))


def header(text: bytes, data: bytes = b"", length: int | None = None) -> bytes:
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


KEPT = {"version": 1, "structure": {}, "integers": {}, "aliases": {}}


def tensors(entries: dict[str, Any], data: bytes = bytes(40), **kept: Any) -> bytes:
    text = json.dumps({**entries, "__metadata__": {"format": "pt", "lathe": json.dumps({**KEPT, **kept})}}).encode()
    return header(text + b" " * (-len(text) % 8), data)


WEIGHT = {"dtype": "F32", "shape": [2, 4], "data_offsets": [0, 32]}
BIAS = {"dtype": "F32", "shape": [2], "data_offsets": [32, 40]}
EVIL = {"channels": {"tensors": {}, "modules": {"0": {"__class__": "x"}}}}
SAFETENSORS: dict[str, bytes] = {
    "a header of 2^62 bytes": header(b"{}", length=2**62),
    "sizes that overflow": tensors({"0.weight": {**WEIGHT, "shape": [2**40, 2**40]}, "0.bias": BIAS}),
    "a structure of code": tensors({"0.weight": WEIGHT, "0.bias": BIAS}, structure=EVIL),
    "a pickle": OPEN,
}


@pytest.mark.parametrize("attack", SAFETENSORS)
def test_safetensors(attack: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(SAFETENSORS[attack])
    said(lambda: get("safetensors").restore(nn.Sequential(nn.Linear(4, 2), nn.ReLU()), path))  # type: ignore[attr-defined]


@pytest.mark.parametrize("content", [OPEN, KEPT | {"structure": EVIL, "state": {}}])
def test_weights(content: Any, tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save(content, path)
    said(lambda: get("weights").restore(nn.Sequential(nn.Linear(4, 2)), path))  # type: ignore[attr-defined]


@pytest.mark.parametrize("place", ["../secret.bin", "link.bin"])
def test_onnx_reads_no_other_file(place: str, tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    weight = onnx.TensorProto(name="w", data_type=1, dims=[4], data_location=onnx.TensorProto.EXTERNAL)
    for key, value in (("location", place), ("offset", "0"), ("length", "16")):
        weight.external_data.add(key=key, value=value)
    info = onnx.helper.make_tensor_value_info
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("Add", ["input", "w"], ["output"])],
        "g",
        [info("input", 1, [4])],
        [info("output", 1, [4])],
        [weight],
    )
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=9)
    (tmp_path / "secret.bin").write_bytes(bytes(16))
    folder = bundle(tmp_path, "onnx", model.SerializeToString())
    (folder / "folder").mkdir()
    (folder / "link.bin").symlink_to(tmp_path / "secret.bin")
    assert "can't be read as ONNX" in refused(folder)


@pytest.mark.parametrize("target", ["aot_inductor", "tensorrt", "torchscript", "torchserve"])
def test_foreign_programs_are_not_loaded(target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Machine code and TorchScript run when they are loaded; what this user exported here is told by a keyed hash."""
    loaded: list[Path] = []
    monkeypatch.setattr(type(get(target)), "load", lambda self, path, *rest: loaded.append(path))
    folder = bundle(tmp_path, target, b"\x7fELF")
    assert f"add trusted=[{target}]" in refused(folder)
    for change in ({"made": None}, {"made": ""}):
        edit_json(folder / "manifest.json", lambda content, change=change: content.update(change))
        refused(folder)
    assert loaded == []
    trust.allow({"trusted": [target]})
    open_bundle(folder)
    trust.allow({"trusted": []})
    own = bundle(tmp_path, target, b"\x7fELF other", made=True)
    open_bundle(own)
    assert loaded == [folder / f"model{get(target).suffix}"] * 2
    shutil.copytree(own, tmp_path / "moved")  # one's own export may lie elsewhere
    open_bundle(tmp_path / "moved")
    # a mark of another export fits no other file
    mark = json.loads((own / "manifest.json").read_text())["made"]
    stranger = bundle(tmp_path, target, b"\x7fELF evil")
    edit_json(stranger / "manifest.json", lambda content: content.update(made=mark))
    refused(stranger)


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        json.dumps({"version": 1, "target": "onnx", "file": "a", **CONTENT, "files": {"a": {"bytes": "x"}}}),
        '{"version": 1, "target": "../x", "file": "a", "files": {}}',
        " " * 11_000_000,
    ],
)
def test_manifests(text: str, tmp_path: Path) -> None:
    folder = bundle(tmp_path, "onnx", b"x")
    (folder / "manifest.json").write_text(text)
    refused(folder)
