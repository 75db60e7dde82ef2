"""Every target available here, for every kind of run: parity from the manifest, and the real command."""

import functools
import json
import os
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.commands import check, command, start
from support.commands import run as run_command
from support.exports import CNN, GPT, leaks, made, request, targets

from lathe import export
from lathe.export.bundle import open_bundle
from lathe.runs.export_model import open_export_model
from lathe.verbs.export import ship

pytestmark = [pytest.mark.slow, pytest.mark.law6]

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
    return functools.cache(lambda kind: made(tmp_path_factory.mktemp(kind), *KINDS[kind]))


# each target once, others of a dense net; the tests of each target, and of documents in test_parity.py, have other nets
KIND_OF = {
    **dict.fromkeys(("onnx", "torch_export"), "gpt"),
    **dict.fromkeys(("onnx_int8", "executorch", "weights", "tensorrt"), "qat"),
    "safetensors": "channels",
}


@pytest.mark.filterwarnings("ignore")  # from compilers and exporters; each target's tests check its own
@pytest.mark.parametrize(("target", "kind"), [(target, KIND_OF.get(target, "dense")) for target in targets()])
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
    assert report["samples"] == (32 if kind == "gpt" else 297)
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


def test_the_command_and_signals_that_leave_its_earlier_export(runs: Any, tmp_path: Path) -> None:
    run = runs("dense")
    words = (f"run={run.path}", "target.samples=50")
    done = check(run_command(*words, cwd=tmp_path, script="scripts/export.py", timeout=500))
    assert f"{run.path}/exports/onnx" in done.stdout
    assert json.loads((run.path / "exports/onnx/parity.json").read_text())["fresh_process"] is True
    before = (run.path / "exports" / "onnx" / "manifest.json").read_bytes()
    for number in (signal.SIGTERM, signal.SIGKILL):
        process = start(command(f"run={run.path}", script="scripts/export.py"), tmp_path)
        pattern, deadline = f".tmp-*-{process.pid}.onnx", time.monotonic() + 120
        while not (half := list((run.path / "exports").glob(pattern))) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert half
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
        assert (run.path / "exports" / "onnx" / "manifest.json").read_bytes() == before
        open_bundle(run.path / "exports" / "onnx")
        if number == signal.SIGTERM:
            assert (process.returncode, errors) == (128 + signal.SIGTERM, "Error: stopped by SIGTERM\n")
        else:
            assert half[0].exists()
            ship(request(run, "target=onnx", "target.samples=5"))
        assert [entry for entry in os.listdir(run.path / "exports") if entry.startswith(".")] == []
