"""Foreign checkpoints, records, archives and data: one message, nothing run, nothing read outside their folder."""

import io
import json
import os
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.hostile_runs import CANARY, OPEN, said
from torch import nn

from lathe.compression.distillation.callback import open_teacher
from lathe.data.published import ARCHIVES, read_archive
from lathe.data.shards import FORMAT, SPLITS, VERSION, Shards, read_index
from lathe.data.token_file import TokenFiles
from lathe.receipt import measured
from lathe.runs.inference import open_run_net
from lathe.runs.rundir import RunDir, open_run


class Evil:
    """Unpickled, it leaves the file."""

    def __reduce__(self) -> Any:
        return open, (CANARY, "w")


def every(state: dict[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    return state | {"state_dict": {name: change(value) for name, value in state["state_dict"].items()}}


def channels(tensors: dict[str, Any], modules: dict[str, Any]) -> Callable[[dict[str, Any]], Any]:
    return lambda state: state | {"structure": {"channels": {"tensors": tensors, "modules": modules}}}


CHECKPOINTS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "code as a weight": lambda state: every(state, lambda value: Evil()),
    "code beside the weights": lambda state: state | {"callbacks": Evil()},
    "sparse tensors": lambda state: every(state, lambda value: torch.zeros(value.shape).to_sparse()),
    "huge tensors of one number": lambda state: every(state, lambda value: torch.zeros(1).expand(10**12)),
    "nothing": lambda state: {},
    "a structure that sets a class": channels({}, {"head": {"__class__": 1}}),
    "a plan of code": lambda state: state | {"structure": {"quantization": {"head": {"plan": {"__class__": "x"}}}}},
    "an owner elsewhere": lambda state: (
        state | {"structure": {"quantization": {"head": {"plan": {}, "weight_quantizer": ["..", "x"]}}}}
    ),
}


@pytest.mark.parametrize("attack", CHECKPOINTS)
def test_checkpoints(attack: str, foreign: RunDir) -> None:
    state = CHECKPOINTS[attack](torch.load(foreign.best, weights_only=True))
    torch.save(state, foreign.best)
    said(lambda: open_run_net(foreign.path))
    said(lambda: open_teacher({"net": nn.Linear(3, 3), "weights": str(foreign.best)}, None))


def test_files_and_folders_that_are_no_checkpoints(foreign: RunDir) -> None:
    for data in (OPEN, b"PK\x03\x04" + bytes(100)):
        foreign.best.write_bytes(data)
        said(lambda: open_run_net(foreign.path))
        said(lambda: open_teacher({"net": nn.Linear(3, 3), "weights": str(foreign.best)}, None))
    foreign.best.unlink()
    foreign.best.mkdir()
    (foreign.best / "meta.pt").write_bytes(OPEN)
    (foreign.best / ".metadata").write_bytes(OPEN)
    said(lambda: open_run_net(foreign.path))
    torch.save({"spread": {}, "checkpoint": {}}, foreign.best / "meta.pt")
    said(lambda: open_run_net(foreign.path))


@pytest.mark.parametrize("text", ["[" * 100_000, "[1]", " " * 60_000_000], ids=lambda text: text[:8])
def test_records(text: str, foreign: RunDir) -> None:
    assert measured.current_comparison(foreign) is None
    (foreign.path / "receipt.json").write_text(text)
    assert measured.current_comparison(foreign) is None
    (foreign.path / "result.json").write_text(text)
    assert "its result.json" in said(lambda: foreign.result)
    (foreign.path / "environment.json").write_text(text)
    said(lambda: open_run(foreign.path, "run"))
    assert not foreign.readable


@pytest.mark.parametrize("figure", ["../outside.svg", "config.yaml"])
def test_a_receipt_writes_over_no_other_file(figure: Any, foreign: RunDir) -> None:
    before = (foreign.path / "config.yaml").read_text()
    (foreign.path / "receipt.json").write_text(json.dumps({"figure": figure, "rows": []}))
    assert "can't be read as a receipt" in said(lambda: measured.add_comparison(foreign, {}))
    assert (foreign.path / "config.yaml").read_text() == before
    assert not list(foreign.path.parent.glob("*.svg"))


def test_pipes_and_links_are_not_waited_for(foreign: RunDir) -> None:
    path = foreign.path / "config.yaml"
    path.unlink()
    os.mkfifo(path)
    said(lambda: open_run(foreign.path, "run"))
    said(lambda: foreign.config)
    path.unlink()
    path.symlink_to(path)
    said(lambda: open_run(foreign.path, "run"))
    assert not foreign.readable
    path.unlink()
    path.symlink_to("/dev/zero")
    said(lambda: open_run(foreign.path, "run"))
    said(lambda: foreign.config)


def tar(path: Path, *members: tuple[str, bytes, bytes]) -> None:
    """A compressed archive of (name, type, content or link's target)."""
    with tarfile.open(path, "w:gz") as archive:
        for name, kind, content in members:
            info = tarfile.TarInfo(name)
            info.type = kind
            info.size = len(content) if kind == tarfile.REGTYPE else 0
            info.linkname = "" if kind == tarfile.REGTYPE else content.decode()
            archive.addfile(info, io.BytesIO(content))


@pytest.mark.parametrize(
    "member",
    [
        ("../" + CANARY, tarfile.REGTYPE, b"x"),
        ("{name}", tarfile.SYMTYPE, b"/etc/passwd"),
        ("{name}", tarfile.FIFOTYPE, b""),
        ("{name}", tarfile.REGTYPE, OPEN),
    ],
)
def test_archives(member: tuple[str, bytes, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for archive in (archive for kind in ARCHIVES.values() for archive in kind):
        name = archive.members["train"][0]
        tar(
            tmp_path / "a.tar.gz", (member[0].format(name=name), member[1], member[2].replace(b"{name}", name.encode()))
        )
        said(lambda archive=archive: read_archive(tmp_path / "a.tar.gz", archive))
    assert [path.name for path in tmp_path.iterdir()] == ["a.tar.gz"]


def entry(**changes: Any) -> dict[str, Any]:
    return {"file": "a.npy", "bytes": 1, "sha256": "0", "samples": 1} | changes


def index(**changes: Any) -> dict[str, Any]:
    splits = {name: {"table": entry(), "shards": [entry(file="a.tar")]} for name in ("train", "val", "test")}
    return {"format": FORMAT, "version": VERSION, "image": [1, 8, 8], "num_classes": 10, "splits": splits} | changes


@pytest.mark.parametrize(
    "content",
    [
        "[" * 100_000,
        index(num_classes={"_target_": "os.system"}),
        index(splits={name: {"table": entry(file="../../etc/passwd"), "shards": [entry()]} for name in SPLITS}),
    ],
    ids=str,
)
def test_indices_of_shards(content: Any, tmp_path: Path) -> None:
    (tmp_path / "index.json").write_text(content if isinstance(content, str) else json.dumps(content))
    said(lambda: read_index(tmp_path))


def test_tables_of_shards_are_no_pickles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    table = tmp_path / "a.npy"
    np.save(table, np.array([Evil()], dtype=object), allow_pickle=True)
    Path(CANARY).unlink(missing_ok=True)
    tar(tmp_path / "a.tar")
    size = (tmp_path / "a.tar").stat().st_size
    splits = {
        name: {"table": entry(bytes=table.stat().st_size), "shards": [entry(file="a.tar", bytes=size)]}
        for name in ("train", "val", "test")
    }
    (tmp_path / "index.json").write_text(json.dumps(index(splits=splits)))
    said(lambda: Shards(str(tmp_path), ".").load())


def test_descriptions_of_tokens(tmp_path: Path) -> None:
    for text in ("[" * 100_000, '{"version": 1}'):
        (tmp_path / "meta.json").write_text(text)
        said(lambda: TokenFiles(str(tmp_path), ".").load())
