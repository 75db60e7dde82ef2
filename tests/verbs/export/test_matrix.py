"""Every target available here, for every kind of run: parity from the manifest, and the real command."""

import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.commands import check, command, start
from support.commands import run as run_command
from support.exports import CNN, leaks, made, request, targets

from lathe import export
from lathe.errors import UserError
from lathe.export.bundle import open_bundle
from lathe.runs.export_model import open_export_model
from lathe.runs.rundir import RunDir
from lathe.verbs.export import ship

pytestmark = [pytest.mark.slow, pytest.mark.law6]

GPT = (
    "data=synthetic_tokens",
    "model=gpt_nano",
    "trainer.max_epochs=1",
    "model.net.depth=1",
    "model.net.width=32",
    "data.source.train_size=512",
    "data.source.val_size=64",
    "data.source.test_size=64",
)
SMALL = ("trainer.max_epochs=4", "compression.receipt=none")
MLP = ("model=mlp", "model.net.width=64", "model.net.depth=2", "data.batch_size=64")
KINDS = {
    "dense": (*MLP, "trainer.max_epochs=4"),
    "channels": (*CNN, *SMALL, "compression=prune_channels", "compression.prune_channels.share=0.7"),
    "qat": (*MLP, *SMALL, "compression=qat"),
    "gpt": GPT,
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Train a kind of run, once."""
    found: dict[str, RunDir] = {}

    def get(kind: str) -> RunDir:
        if kind not in found:
            found[kind] = made(tmp_path_factory.mktemp(kind), *KINDS[kind])
        return found[kind]

    return get


# each target once; the tests of each target, and of documents in test_parity.py, have other nets
KIND_OF = {
    "onnx": ["gpt"],
    "onnx_int8": ["channels"],
    "torch_export": ["gpt"],
    "aot_inductor": ["dense"],
    "torchscript": ["dense"],
    "executorch": ["qat"],
    "torchserve": ["dense"],
    "safetensors": ["channels"],
    "weights": ["qat"],
    "tensorrt": ["qat"],
}
PAIRS = [(target, kind) for target in targets() for kind in KIND_OF[target]]


@pytest.mark.filterwarnings("ignore")  # from compilers and exporters; each target's tests check its own
@pytest.mark.parametrize(("target", "kind"), PAIRS)
def test_what_is_exported_is_what_was_trained(
    runs: Any, kind: str, target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = runs(kind)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # a recognisable name, unlike /tmp
    ship(request(run, f"target={target}"))
    folder = run.path / "exports" / target
    if kind != "gpt":
        assert leaks(run, target, tmp_path) == []
    report = json.loads((folder / "parity.json").read_text())
    for what in ("held_out", "odd_inputs"):
        assert report[what]["relative"] <= report["tolerance"] <= 0.1
    assert report["held_out"]["agreement"] >= report["least_agreement"] >= 0.97
    assert report["samples"] == (64 if kind == "gpt" else 297)
    metric = report["metric"]
    assert metric == ("perplexity" if kind == "gpt" else "accuracy")
    own, found = report["figures"]["trained"][metric], report["figures"]["file"][metric]
    assert own == pytest.approx(run.result[f"test/{metric}"], rel=1e-4)
    assert found == pytest.approx(own, rel=0.02)
    assert found == pytest.approx(report["figures"]["module"][metric], rel=0.02)
    assert len({shape[0] for shape in report["odd_inputs"]["shapes"]}) == 6
    if not export.get(target).computes:
        return
    bundle = open_bundle(folder, 1)
    kept = bundle.manifest["integers"]
    assert kept is (kind == "qat" if export.get(target).integers is None else export.get(target).integers)
    ready = open_export_model(run.path, integers=export.get(target).integers)
    for batch in (1, 5, 70):
        shape = list(ready.example.shape[1:]) if kind != "gpt" else [1 + batch % 32]
        top = 256 if kind != "gpt" else ready.facts["input"]["vocab_size"]
        x = torch.randint(0, top, (batch, *shape), dtype=ready.example.dtype)
        with torch.no_grad():
            wanted = ready.net(x)
        answer = torch.from_numpy(np.asarray(bundle(x.numpy()))).float()
        assert answer.shape == wanted.shape
        assert float((answer - wanted).abs().max() / wanted.abs().max()) <= report["tolerance"]


def test_the_command(runs: Any, tmp_path: Path) -> None:
    run = runs("dense")
    words = (f"run={run.path}", "target.samples=50", "-m", "target=onnx,onnx_int8")
    done = check(run_command(*words, cwd=tmp_path, script="scripts/export.py", timeout=500))
    for target in ("onnx", "onnx_int8"):
        assert f"{run.path}/exports/{target}" in done.stdout
        assert json.loads((run.path / "exports" / target / "parity.json").read_text())["fresh_process"] is True


@pytest.mark.parametrize("name", ["SIGTERM", "SIGKILL"])
def test_a_signal_leaves_the_earlier_export(runs: Any, tmp_path: Path, name: str) -> None:
    run = runs("dense")
    ship(request(run, "target=onnx", "target.samples=5"))
    before = (run.path / "exports" / "onnx" / "manifest.json").read_bytes()
    process = start(command(f"run={run.path}", script="scripts/export.py"), tmp_path)
    deadline = time.monotonic() + 120
    while not (half := list((run.path / "exports").glob(f".tmp-*-{process.pid}.onnx"))) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert half
    process.send_signal(getattr(signal, name))
    _, errors = process.communicate(timeout=60)
    assert (run.path / "exports" / "onnx" / "manifest.json").read_bytes() == before
    open_bundle(run.path / "exports" / "onnx")
    if name == "SIGKILL":
        assert half[0].exists()
        ship(request(run, "target=onnx", "target.samples=5"))
    else:
        assert process.returncode == 128 + getattr(signal, name)
        assert errors == "Error: stopped by SIGTERM\n"
    assert [entry for entry in os.listdir(run.path / "exports") if entry.startswith(".")] == []


def test_a_full_disk(runs: Any, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3000k", "none", str(disk)], capture_output=True).returncode:
        pytest.skip("needs the right to mount a file system")
    try:
        shutil.copytree(runs("dense").path, disk / "run", ignore=shutil.ignore_patterns("exports"))
        free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
        (disk / "ballast").write_bytes(b"x" * (free - 20_000))
        with pytest.raises(UserError, match=r"can't be written, the disk is full: free some space"):
            ship(request(RunDir(disk / "run"), "target=onnx"))
        assert not (disk / "run" / "exports").exists()
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)
