"""Receipts of users' LightningModules: of the core, with the monitored metric."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.own_lightning import QUICK
from support.runs import new_run

from lathe import export, trust
from lathe.receipt import measured
from lathe.runs.rundir import RunDir
from lathe.training.train import train

pytestmark = [
    pytest.mark.law5,
    pytest.mark.filterwarnings("ignore:compression.*of the weights"),
    pytest.mark.filterwarnings("ignore:compression.receipt=quick will be without"),
]
MONITOR = ("callbacks.checkpoint.monitor=val_loss", "callbacks.checkpoint.mode=min", "test=false")
PRUNE = (
    "compression=prune",
    "compression.prune.sparsity=0.5",
    "compression.prune.end=0.5",
    "compression.prune.start=0",
)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(measured.EFFORTS, "quick", measured.Effort(repeats=5, warmup=1, seconds=1.0))
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.fixture
def no_onnx(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves out exports, which take most of the time."""
    monkeypatch.setattr(type(export.get("onnx")), "available", lambda self: "no onnx here.")


def fit(folder: Path, net: str, kind: str, *words: str) -> RunDir:
    trust.allow({"trusted": ["support"]})
    cfg = new_run(folder, *QUICK, *MONITOR, f"model.net={{_target_: support.modules.{net}}}", *words)
    cfg["data"] = {"_target_": "support.modules.Data", "kind": kind}
    (Path(cfg["paths"]["run_dir"]) / "config.yaml").write_text(json.dumps(cfg))
    train(cfg)
    return RunDir(cfg["paths"]["run_dir"])


def test_a_pruned_classifier_beside_the_run_that_it_started_from(tmp_path: Path, no_onnx: None) -> None:
    """Sizes by arithmetic, the metrics of result.json, and times of both."""
    dense = fit(tmp_path / "dense", "Classifier", "image")
    words = (*PRUNE, "compression.prune.head=true", f"ckpt_path={dense.path}")
    run = fit(tmp_path / "pruned", "Classifier", "image", *words)
    found: dict[str, Any] = run.receipt
    parameters = 64 * 32 + 32 + 32 * 4 + 4
    assert found["size"]["parameters"] == found["dense"]["size"]["parameters"] == parameters
    assert found["size"]["non_zero"] == pytest.approx(parameters - (64 * 32 + 32 * 4) / 2, abs=40)
    assert found["size"]["macs"] == 64 * 32 + 32 * 4
    assert [row["name"] for row in found["layers"]] == ["1", "3"]
    rows = {(row["of"], row["split"]): row["figures"] for row in found["figures"]}
    assert rows == {
        (of, "val"): {"loss": source.result["val_loss"]} for of, source in (("this", run), ("dense", dense))
    }
    assert {(row["of"], row["backend"]) for row in found["latency"]} >= {
        *(("this", "eager"), ("dense", "eager"), ("dense", "compiled_bf16")),
    }
    left = ["dense onnx", "this onnx", "metrics of the files, and equal predictions"]
    assert [row["form"] for row in found["left_out"]] == left
    assert "Verdict: " in (run.path / "receipt.md").read_text()


def test_the_dense_run_may_have_named_no_core(tmp_path: Path, no_onnx: None) -> None:
    dense = fit(tmp_path / "dense", "Convolutional", "image")
    words = (*PRUNE, "compression.prune.head=true", "model.core=backbone", f"ckpt_path={dense.path}")
    found: dict[str, Any] = fit(tmp_path / "pruned", "Convolutional", "image", *words).receipt
    assert found["size"]["parameters"] == found["dense"]["size"]["parameters"] < dense.result["parameters"]
    assert found["size"]["non_zero"] < found["dense"]["size"]["non_zero"]


def test_a_core_of_several_inputs(tmp_path: Path, no_onnx: None) -> None:
    """The untrained dense net has no metric."""
    run = fit(tmp_path, "Recurrent", "sequence", *PRUNE)
    found: dict[str, Any] = run.receipt
    assert [row["name"] for row in found["layers"]] == ["head.0", "head.2"]
    assert [(row["of"], row["figures"]) for row in found["figures"]] == [("this", {"loss": run.result["val_loss"]})]
    assert found["size"]["macs"] > 0
    assert {row["batch"] for row in found["latency"] if row["backend"] == "eager"} == {1, 32}


@pytest.mark.slow
@pytest.mark.parametrize(("net", "kind"), [("LanguageModel", "text"), ("Convolutional", "image")])
def test_files_are_timed_and_weighed(tmp_path: Path, net: str, kind: str) -> None:
    run = fit(tmp_path, net, kind, "compression=qat", "compression.qat.start=0.3")
    found: dict[str, Any] = run.receipt
    assert {row["backend"] for row in found["latency"] if row["of"] == "this"} >= {"eager", "onnx_int8"}
    files = {(row["of"], row["target"]): row["bytes"] for row in found["files"]}
    assert set(files) >= {("this", "onnx_int8"), ("this", "weights"), ("dense", "onnx")}
    assert [row["form"] for row in found["left_out"]] == ["metrics of the files, and equal predictions"]
