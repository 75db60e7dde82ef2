"""The verb on a small run: what it leaves on disk, and what it says and leaves of mistakes and faults."""

import io
import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console
from support.exports import WHOLE, left, request

from lathe.errors import UserError
from lathe.export.bundle import open_bundle
from lathe.export.manifest import sha256
from lathe.runs.export_model import open_export_model
from lathe.runs.rundir import RunDir
from lathe.verbs.export import parity, ship
from lathe.verbs.export.ship import show

pytestmark = pytest.mark.law6


@pytest.mark.usefixtures("reloaded")
def test_an_export_and_its_proof(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    reports = ship(request(run, "target=[onnx,weights]"))
    assert left(run) == [*WHOLE, "weights", "weights/manifest.json", "weights/model.pt", "weights/parity.json"]
    for name, report in reports.items():
        assert json.loads((run.path / "exports" / name / "parity.json").read_text()) == report
        assert report["samples"] == 297
        assert report["held_out"]["n"] == 297
        assert (
            report["figures"]["trained"]["accuracy"]
            == report["figures"]["file"]["accuracy"]
            == report["figures"]["module"]["accuracy"]
        )
        assert report["figures"]["file"]["accuracy"] == pytest.approx(run.result["test/accuracy"], abs=1e-7)
        assert report["figures"]["file"]["loss"] == pytest.approx(run.result["test/loss"], rel=1e-5)
        assert report["held_out"]["relative"] < 5e-6
        assert (report["held_out"]["agreement"], report["drop"], report["metric"]) == (1.0, 0.0, "accuracy")
        assert [shape[0] for shape in report["odd_inputs"]["shapes"] if shape][-3:] == [7, 16, 33]
    found = json.loads((run.path / "exports/onnx/manifest.json").read_text())
    assert found["input"] == {"name": "input", "dtype": "uint8", "shape": ["batch", 1, 8, 8], "layout": "NCHW"}
    assert found["output"] == {"name": "output", "dtype": "float32", "shape": ["batch", 10]}
    assert found["preprocess"] == {
        "in_graph": True,
        "scale": 1 / 255,
        "mean": [0.305],
        "std": [0.376],
        "size": [8, 8],
        "resize": None,
        "squash": False,
    }
    assert found["classes"] == [str(digit) for digit in range(10)]
    assert (found["target"], found["run"], found["checkpoint"], found["options"]) == ("onnx", "run", "best", {})
    assert (found["task"], found["net"], found["integers"], found["calibrated"]) == (
        "ClassificationTask",
        "MLP",
        False,
        False,
    )
    assert found["checkpoint_sha256"] == sha256(run.best)
    assert sorted(found["files"]) == ["model.onnx", "parity.json"]
    assert {"torch", "onnxruntime"} <= found["versions"].keys()
    weights = json.loads((run.path / "exports/weights/manifest.json").read_text())
    assert (weights["input"]["dtype"], weights["preprocess"]["in_graph"]) == ("float32", False)
    printed = capsys.readouterr().out
    assert "accuracy on 297 held-out samples (test)" in printed
    assert str(run.path / "exports" / "onnx") in printed


@pytest.mark.usefixtures("stub")
def test_clients_send_pixels_wherever_they_are_normalised(run: RunDir) -> None:
    ready = open_export_model(run.path)
    x = parity.held_out(ready, "test", 50).inputs[0]
    with torch.no_grad():
        wanted = ready.net(x)
    for preprocess, dtype in (("true", "uint8"), ("false", "float32")):
        ship(request(run, f"target.preprocess={preprocess}", "target.samples=20"))
        bundle = open_bundle(run.path / "exports" / "onnx", 1)
        assert bundle.manifest["input"]["dtype"] == dtype
        torch.testing.assert_close(torch.from_numpy(bundle(x.numpy())), wanted, rtol=0, atol=1e-5)


@pytest.mark.usefixtures("here")
def test_an_integer_export_of_a_float_run_is_calibrated(run: RunDir) -> None:
    report = ship(request(run, "target=onnx_int8"))["onnx_int8"]
    assert (report["arithmetic"], report["tolerance"]) == ("int8", 0.1)
    assert 0 < report["held_out"]["relative"] < 0.02
    assert report["drop"] <= 0.02
    found = json.loads((run.path / "exports/onnx_int8/manifest.json").read_text())
    assert (found["integers"], found["calibrated"]) == (True, True)


@pytest.mark.usefixtures("stub")
def test_a_new_export_replaces_all_of_the_earlier_one(run: RunDir) -> None:
    ship(request(run, "target.samples=10"))
    (run.path / "exports" / "onnx" / "stray.txt").write_text("of before")
    assert ship(request(run, "target.split=val", "target.samples=30", "batch_size=7"))["onnx"]["samples"] == 30
    assert left(run) == WHOLE
    assert json.loads((run.path / "exports/onnx/parity.json").read_text())["split"] == "val"


@pytest.mark.usefixtures("stub")
def test_other_sizes_are_not_held_against_the_runs_figures(run: RunDir) -> None:
    report = ship(request(run, "target.input_size=[20,12]", "target.max_drop=0.0"))["onnx"]
    assert (report["max_drop"], report["odd_inputs"]["shapes"][0]) == (None, [1, 1, 20, 12])
    report = ship(request(run, "target.input_size=any", "target.max_drop=0.0"))["onnx"]
    assert report["max_drop"] == 0.0
    assert len({tuple(shape[2:]) for shape in report["odd_inputs"]["shapes"]}) > 5
    manifest = json.loads((run.path / "exports/onnx/manifest.json").read_text())
    assert manifest["input"]["shape"] == ["batch", 1, "height", "width"]
    assert manifest["preprocess"]["resize"] == "middle, bilinear, antialiased"


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["target.onnx=null"], r"^target is empty: choose one of onnx, "),
        (["checkpoint=newest"], r"has no checkpoint 'newest': it has best, last; checkpoint=last takes that\.$"),
        (["target.input_size=[0,3]"], r"^target\.input_size=\[0, 3\]: give \[height, width\] in pixels"),
        (["target.preprocess=false", "target.input_size=any"], r"^target\.input_size=any scales pictures in the graph"),
        (["trainer.devices=2"], r"^trainer\.devices=2: a run is exported in one process; leave it 1\.$"),
    ],
)
def test_mistakes_are_told_and_leave_nothing(run: RunDir, overrides: list[str], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        ship(request(run, *overrides))
    assert left(run) == []


def test_a_run_without_a_checkpoint(run: RunDir) -> None:
    shutil.rmtree(run.path / "checkpoints")
    with pytest.raises(UserError, match=r"has no checkpoint 'best': it has none at all\.$"):
        ship(request(run))
    assert left(run) == []


def test_a_missing_package(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(UserError, match=r"^onnxruntime can't be imported: pip install -e '\.\[export\]'\.$"):
        ship(request(run))
    assert left(run) == []


def test_the_table_fits_eighty_columns() -> None:
    held = {"relative": 1.234e-5, "agreement": 1.0}
    report = {
        "arithmetic": "float32",
        "held_out": held,
        "metric": "perplexity",
        "samples": 10000,
        "split": "test",
        "seconds": 1234.5,
        "figures": {which: {"perplexity": 1234.5678} for which in ("trained", "module")}
        | {"file": {"perplexity": None}},
    }
    calibrated = {**report, "figures": {**report["figures"], "module": {"perplexity": 1235.0}}}
    console = Console(width=80, record=True, file=io.StringIO())
    show({"torch_export": report, "aot_inductor": calibrated}, Path("/a/run"), console)
    lines = console.export_text().splitlines()
    assert max(map(len, lines)) <= 80
    assert not any("…" in line for line in lines)
    assert any("aot_inductor" in line and "1.2e-05" in line and "1234.5678" in line and "inf" in line for line in lines)
    assert any(
        line.startswith("aot_inductor: ") for line in lines
    )  # why its metrics differ where predictions are equal
