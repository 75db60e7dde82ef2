"""The verb on a small run: what it leaves on disk, and what it says and leaves of mistakes and faults."""

import errno
import io
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from exporting import contents, needles, request, targets
from helpers import ROOT
from rich.console import Console
from torch import Tensor, nn

from lathe import export
from lathe.errors import UserError
from lathe.export import onnx
from lathe.export.bundle import open_bundle
from lathe.rundir import RunDir
from lathe.shippable import open_shippable
from lathe.shipping import parity, ship
from lathe.shipping.compare import RELOAD
from lathe.shipping.ship import show


@pytest.fixture
def run(mlp: RunDir, tmp_path: Path) -> RunDir:
    """A copy whose exports are this test's own."""
    shutil.copytree(mlp.path, tmp_path / "run", ignore=shutil.ignore_patterns("exports"))
    return RunDir(tmp_path / "run")


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers in this process: the fresh one has a test of its own."""

    elsewhere = parity.answered

    def answered(command: Any, job: dict[str, Any], inputs: list[Tensor]) -> list[Tensor]:
        if command == [RELOAD]:
            return elsewhere(command, job, inputs)
        bundle = open_bundle(job["folder"], 1)
        return [torch.from_numpy(np.asarray(bundle.run(x.numpy()))).float() for x in inputs]

    monkeypatch.setattr(parity, "answered", answered)


def left(run: RunDir) -> list[str]:
    exports = run.path / "exports"
    return sorted(str(path.relative_to(exports)) for path in exports.rglob("*")) if exports.exists() else []


WHOLE = ["onnx", "onnx/manifest.json", "onnx/model.onnx", "onnx/parity.json"]


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
    }
    assert found["classes"] == [str(digit) for digit in range(10)]
    assert (found["target"], found["run"], found["checkpoint"], found["options"]) == ("onnx", "run", "best", {})
    assert (found["task"], found["net"], found["integers"], found["calibrated"]) == ("ClassificationTask", "MLP", False, False)
    assert sorted(found["files"]) == ["model.onnx", "parity.json"]
    assert {"torch", "onnxruntime"} <= found["versions"].keys()
    weights = json.loads((run.path / "exports/weights/manifest.json").read_text())
    assert (weights["input"]["dtype"], weights["preprocess"]["in_graph"]) == ("float32", False)
    printed = capsys.readouterr().out
    assert "accuracy on 297 held-out samples (test)" in printed
    assert str(run.path / "exports" / "onnx") in printed


@pytest.mark.usefixtures("here")
def test_clients_send_pixels_wherever_they_are_normalised(run: RunDir) -> None:
    ready = open_shippable(run.path)
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
    assert (report["arithmetic"], report["tolerance"]) == ("int8", 0.05)
    assert 0 < report["held_out"]["relative"] < 0.02
    assert report["drop"] <= 0.02
    found = json.loads((run.path / "exports/onnx_int8/manifest.json").read_text())
    assert (found["integers"], found["calibrated"]) == (True, True)


@pytest.mark.usefixtures("here")
def test_a_new_export_replaces_all_of_the_earlier_one(run: RunDir) -> None:
    ship(request(run, "target.samples=10"))
    (run.path / "exports" / "onnx" / "stray.txt").write_text("of before")
    assert ship(request(run, "target.split=val", "target.samples=30", "batch_size=7"))["onnx"]["samples"] == 30
    assert left(run) == WHOLE
    assert json.loads((run.path / "exports/onnx/parity.json").read_text())["split"] == "val"


@pytest.mark.usefixtures("here")
def test_other_sizes_are_not_held_against_the_runs_figures(run: RunDir) -> None:
    report = ship(request(run, "target.input_size=[20,12]", "target.max_drop=0.0"))["onnx"]
    assert (report["max_drop"], report["odd_inputs"]["shapes"][0]) == (None, [1, 1, 20, 12])
    report = ship(request(run, "target.input_size=any", "target.max_drop=0.0"))["onnx"]
    assert report["max_drop"] == 0.0
    assert len({tuple(shape[2:]) for shape in report["odd_inputs"]["shapes"]}) > 5
    manifest = json.loads((run.path / "exports/onnx/manifest.json").read_text())
    assert manifest["input"]["shape"] == ["batch", 1, "height", "width"]
    assert manifest["preprocess"]["resize"] == "bilinear, antialiased"


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["+target.onnx.opzet=1"], r"^target\.onnx\.opzet=1: onnx has no such option; it has no options"),
        (["+target.onxn.opset=1"], r"^target=onxn is unknown; did you mean onnx"),
        (["+target.sampels=3"], r"^target\.sampels=3: there is no such key; did you mean samples\?$"),
        (["target.onnx=null"], r"^target is empty: choose one of onnx, "),
        (["+target.onnx.integers=true"], r"^target\.onnx\.integers=True: onnx has no such option"),
        (
            ["target=aot_inductor", "target.aot_inductor.integers=8"],
            r"^target\.aot_inductor\.integers=8: choose true, false or null\.$",
        ),
        (["checkpoint=newest"], r"has no checkpoint 'newest': it has best, last\.$"),
        (["target.split=train"], r"^target\.split=train: choose test or val\.$"),
        (["target.samples=0"], r"^target\.samples=0: give a whole number from 1, or null\.$"),
        (["target.samples=2.5"], r"^target\.samples=2\.5: give a whole number"),
        (["batch_size=0"], r"^batch_size=0: give a whole number from 1, or null\.$"),
        (["target.tolerance=0"], r"^target\.tolerance=0: give a share above 0, or null\.$"),
        (["target.tolerance=tight"], r"^target\.tolerance=tight: give a share above 0"),
        (["target.agreement=2"], r"^target\.agreement=2: give a share from 0 to 1, or null\.$"),
        (["target.max_drop=-1"], r"^target\.max_drop=-1: give a share from 0, or null\.$"),
        (["target.preprocess=1"], r"^target\.preprocess=1: choose true or false\.$"),
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
    monkeypatch.setattr(export.get("onnx"), "available", lambda: "onnx can't be imported: pip install onnx.")
    with pytest.raises(UserError, match=r"^onnx can't be imported: pip install onnx\.$"):
        ship(request(run))
    assert left(run) == []


class Wrong(nn.Module):
    """A net that answers something else, or nothing that can be compared."""

    def __init__(self, net: nn.Module, kind: str) -> None:
        super().__init__()
        self.net, self.kind = net, kind

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.net(x)
        return {"shifted": y + 0.1, "nan": y * float("nan"), "shape": y[:, :9], "order": y.flip(1)}[self.kind]


@pytest.fixture
def wrong(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that makes ONNX's export write a wrong net."""
    write = onnx.export

    def choose(kind: str) -> None:
        monkeypatch.setattr(onnx, "export", lambda net, example, path: write(Wrong(net, kind).eval(), example, path))

    return choose


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        (
            "shifted",
            r"logits on held-out data differ from the module's by 0\.\d+ of the largest, above the tolerance of 5e-05, so nothing",
        ),
        ("nan", r"differ from the module's by nan of the largest"),
        (
            "shape",
            r"^target=onnx: an input of shape \[297, 1, 8, 8\] is answered with \[297, 9\] instead of \[297, 10\], so nothing was",
        ),
        ("order", r"logits on held-out data differ"),
    ],
)
def test_a_file_that_computes_something_else_is_not_left(run: RunDir, wrong: Any, kind: str, sentence: str) -> None:
    wrong(kind)
    with pytest.raises(UserError, match=sentence):
        ship(request(run, "batch_size=297"))
    assert left(run) == []


@pytest.mark.usefixtures("here")
def test_a_failed_export_leaves_the_earlier_one(run: RunDir, wrong: Any) -> None:
    ship(request(run))
    before = {name: (run.path / "exports" / name).read_bytes() for name in WHOLE[1:]}
    wrong("order")
    with pytest.raises(UserError, match=r"target\.tolerance=<share> allows more"):
        ship(request(run))
    assert {name: (run.path / "exports" / name).read_bytes() for name in left(run) if "/" in name} == before
    with pytest.raises(
        UserError, match=r"of the held-out predictions equal the module's, below 0\.999, so nothing was exported; target\.agr"
    ):
        ship(request(run, "target.tolerance=10"))
    with pytest.raises(
        UserError, match=r"^target=onnx: accuracy on held-out data is 0\.\d+ and that of the run's own net 0\.\d+, worse by"
    ):
        ship(request(run, "target.tolerance=10", "target.agreement=0"))
    report = ship(request(run, "target.tolerance=10", "target.agreement=0", "target.max_drop=null"))["onnx"]
    assert report["drop"] > 0.5


@pytest.mark.usefixtures("here")
def test_a_net_that_answers_nan_is_not_exported(run: RunDir) -> None:
    state = torch.load(run.best, weights_only=True)
    name = next(name for name in state["state_dict"] if name.endswith("bias"))
    state["state_dict"][name][0] = float("nan")
    torch.save(state, run.best)
    with pytest.raises(
        UserError, match=r"^target=onnx: the run's own net answers an input of shape .* with nan or inf, so nothing was"
    ):
        ship(request(run))
    assert left(run) == []


def test_a_net_that_a_target_cannot_take(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(net: Any, example: Any, path: Path) -> None:
        path.write_bytes(b"half")
        raise RuntimeError("no operator for this\nand a long story")

    monkeypatch.setattr(onnx, "export", fails)
    with pytest.raises(
        UserError, match=r"^target=onnx can't take this net \(RuntimeError: no operator for this\): choose another target"
    ):
        ship(request(run))
    assert left(run) == []


@pytest.mark.usefixtures("here")
def test_targets_after_one_that_fails_are_made(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(export.get("weights"), "available", lambda: "weights need what is missing.")
    with pytest.raises(UserError, match=r"^weights need what is missing\.$"):
        ship(request(run, "target=[weights,onnx]"))
    assert left(run) == WHOLE
    assert "│ onnx " in capsys.readouterr().out


def test_a_process_that_fails_is_told_in_its_own_words(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx, "export", lambda net, example, path: path.write_bytes(b"no graph"))
    with pytest.raises(
        UserError, match=r"^target=onnx: a fresh process could not run the file \(.*can't be read as ONNX.*, so nothing was"
    ):
        ship(request(run))
    assert left(run) == []


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EACCES, errno.EROFS])
def test_a_disk_that_cannot_be_written(run: RunDir, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise OSError(code, "no")

    monkeypatch.setattr(onnx, "export", fails)
    with pytest.raises(
        UserError, match=r"exports/onnx can't be written, (the disk is full|writing there is not|the disk is read-only)"
    ):
        ship(request(run))
    assert left(run) == []


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("name", ["model.onnx", "parity.json", "manifest.json"])
def test_a_tampered_export_is_refused_at_load(run: RunDir, name: str) -> None:
    ship(request(run, "target.samples=5"))
    path = run.path / "exports" / "onnx" / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content[:-20]) if name == "manifest.json" else bytes(content))
    with pytest.raises(UserError, match=r"(SHA-256 differs|can't be read as the manifest).*export the run again"):
        open_bundle(path.parent)


def test_the_table_fits_eighty_columns() -> None:
    held = {"relative": 1.234e-5, "agreement": 1.0}
    report = {"arithmetic": "float32", "held_out": held, "metric": "perplexity", "samples": 10000, "split": "test", "seconds": 1234.5,
              "figures": {"trained": {"perplexity": 1234.5678}, "file": {"perplexity": None}}}  # fmt: skip
    console = Console(width=80, record=True, file=io.StringIO())
    show({"torch_export": report, "aot_inductor": report}, Path("/a/run"), console)
    lines = console.export_text().splitlines()
    assert max(map(len, lines)) <= 80
    assert not any("…" in line for line in lines)
    assert any("aot_inductor" in line and "1.2e-05" in line and "1234.5678" in line and "inf" in line for line in lines)


COMPILED = ("aot_inductor", "executorch", "tensorrt")  # slow to make


@pytest.fixture(scope="module")
def haystack(mlp: RunDir, tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    folder = tmp_path_factory.mktemp("haystack") / "run"
    shutil.copytree(mlp.path, folder, ignore=shutil.ignore_patterns("exports"))
    return RunDir(folder)


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in COMPILED)) for name in targets()])
def test_no_file_holds_training_data_or_paths(haystack: RunDir, name: str) -> None:
    """Also of integers, whose ranges come from training data."""
    ship(request(haystack, f"target={name}", "target.samples=3"))
    wanted = needles(open_shippable(haystack.path).data)
    places = {str(place).encode() for place in (Path.home(), Path.cwd(), ROOT, haystack.path, sys.prefix)}
    for path in (haystack.path / "exports" / name).iterdir():
        for text in contents(path):
            assert [what for what, needle in wanted.items() if needle in text] == [], path
            assert [place for place in places if len(place) > 5 and place in text] == [], path


def test_what_is_looked_for_would_be_found(haystack: RunDir, tmp_path: Path) -> None:
    data = open_shippable(haystack.path).data
    x, _ = next(iter(data.eval_loader("train")))
    torch.save({"view": x[3:4]}, tmp_path / "leak.pt")  # a view: all of its storage is written
    found = [what for what, needle in needles(data).items() if any(needle in text for text in contents(tmp_path / "leak.pt"))]
    assert "float32 image 0" in found
