"""The export command on a small run: its files, what is left after errors, and no training data in it."""

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from support.exports import WHOLE, contents, leaks, left, needles, request
from torch import Tensor, nn

from lathe.errors import UserError
from lathe.export.bundle import open_bundle
from lathe.export.targets.onnx import Onnx
from lathe.export.targets.weights import Weights
from lathe.files import sha256
from lathe.runs.export_model import open_export_model
from lathe.runs.rundir import RunDir
from lathe.verbs import export as parity
from lathe.verbs.export import ship

pytestmark = pytest.mark.law6


@pytest.mark.usefixtures("reloaded")
def test_an_export_and_its_proof(run: RunDir) -> None:
    reports = ship(request(run, "target=[onnx,weights]"))
    assert left(run) == [*WHOLE, "weights", "weights/manifest.json", "weights/model.pt", "weights/parity.json"]
    for name, report in reports.items():
        assert json.loads((run.path / "exports" / name / "parity.json").read_text()) == report
        assert report["samples"] == 297
        assert report["held_out"]["n"] == 297
        figures = report["figures"]
        assert figures["trained"]["accuracy"] == figures["file"]["accuracy"] == figures["module"]["accuracy"]
        assert figures["file"]["accuracy"] == pytest.approx(run.result["test/accuracy"], abs=1e-7)
        assert figures["file"]["loss"] == pytest.approx(run.result["test/loss"], rel=1e-5)
        assert report["held_out"]["relative"] < 5e-6
        assert (report["held_out"]["agreement"], report["drop"], report["metric"]) == (1.0, 0.0, "accuracy")
        assert [shape[0] for shape in report["odd_inputs"]["shapes"] if shape][-3:] == [7, 16, 33]
    found = json.loads((run.path / "exports/onnx/manifest.json").read_text())
    assert found["input"] == {"name": "input", "dtype": "uint8", "shape": ["batch", 1, 8, 8], "layout": "NCHW"}
    assert found["output"] == {"name": "output", "dtype": "float32", "shape": ["batch", 10]}
    done = found["preprocess"]
    assert (done["in_graph"], done["mean"], done["std"], done["size"]) == (True, [0.305], [0.376], [8, 8])
    assert found["classes"] == [str(digit) for digit in range(10)]
    assert (found["target"], found["run"], found["checkpoint"], found["options"]) == ("onnx", "run", "best", {})
    assert (found["net"], found["integers"], found["calibrated"]) == ("MLP", False, False)
    assert found["checkpoint_sha256"] == sha256(run.best)
    assert sorted(found["files"]) == ["model.onnx", "parity.json"]
    assert {"torch", "onnxruntime"} <= found["versions"].keys()
    weights = json.loads((run.path / "exports/weights/manifest.json").read_text())
    assert (weights["input"]["dtype"], weights["preprocess"]["in_graph"]) == ("float32", False)


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
def test_files_for_other_sizes_are_not_compared_with_the_runs_figures(run: RunDir) -> None:
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
        (["checkpoint=newest"], "has no checkpoint 'newest'"),
        (["target.preprocess=false", "target.input_size=any"], r"^target\.input_size=any"),
    ],
)
def test_wrong_requests_are_refused_and_leave_nothing(run: RunDir, overrides: list[str], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        ship(request(run, *overrides))
    assert left(run) == []


class Wrong(nn.Module):
    """A net that returns other values, or nothing that can be compared."""

    def __init__(self, net: nn.Module, kind: str) -> None:
        super().__init__()
        self.net, self.kind = net, kind

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.net(x)
        return {"shifted": y + 0.1, "nan": y * float("nan"), "shape": y[:, :9], "order": y.flip(1)}[self.kind]


@pytest.fixture
def wrong(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make ONNX's export write a wrong net."""
    write = Onnx.export

    def choose(kind: str) -> None:
        fault = lambda self, net, *rest: write(self, Wrong(net, kind).eval(), *rest)  # noqa: E731
        monkeypatch.setattr(Onnx, "export", fault)

    return choose


@pytest.mark.usefixtures("stub")
@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("shifted", r"logits on held-out data differ from the module's by 0\.\d+ of the largest"),
        ("nan", r"differ from the module's by nan of the largest"),
        ("shape", r"an output has shape \[297, 9\] instead of \[297, 10\]"),
    ],
)
def test_a_file_that_computes_something_else_is_not_left(run: RunDir, wrong: Any, kind: str, sentence: str) -> None:
    wrong(kind)
    with pytest.raises(UserError, match=sentence):
        ship(request(run, "batch_size=297"))
    assert left(run) == []


@pytest.mark.usefixtures("stub")
def test_a_failed_export_leaves_the_earlier_one(run: RunDir, wrong: Any) -> None:
    ship(request(run))
    before = {name: (run.path / "exports" / name).read_bytes() for name in WHOLE[1:]}
    wrong("order")
    with pytest.raises(UserError, match=r"target\.tolerance=<share> allows more"):
        ship(request(run))
    assert {name: (run.path / "exports" / name).read_bytes() for name in left(run) if "/" in name} == before
    with pytest.raises(
        UserError, match=r"of the held-out predictions equal the module's, below 0\.999, so nothing was"
    ):
        ship(request(run, "target.tolerance=10"))
    with pytest.raises(UserError, match=r"^target=onnx: accuracy on held-out data is 0\.\d+ and that of the run's own"):
        ship(request(run, "target.tolerance=10", "target.agreement=0"))
    report = ship(request(run, "target.tolerance=10", "target.agreement=0", "target.max_drop=null"))["onnx"]
    assert report["drop"] > 0.5


@pytest.mark.usefixtures("stub")
def test_a_net_that_answers_nan_is_not_exported(run: RunDir) -> None:
    state = torch.load(run.best, weights_only=True)
    for name in [name for name in state["state_dict"] if name.endswith("weight")]:
        state["state_dict"][name].fill_(3e38)  # finite, as a checkpoint has to be; the sums overflow float32
    torch.save(state, run.best)
    with pytest.raises(
        UserError, match=r"^target=onnx: the run's own net answers an input of shape .* with nan or inf"
    ):
        ship(request(run))
    assert left(run) == []


def test_a_net_that_a_target_cannot_take(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: Onnx, net: Any, example: Any, path: Path) -> None:
        path.write_bytes(b"half")
        raise RuntimeError("no operator for this\nand a long story")

    monkeypatch.setattr(Onnx, "export", fails)
    with pytest.raises(UserError, match=r"^target=onnx can't take this net \(.*:\d+\) \(RuntimeError: no operator for"):
        ship(request(run))
    assert left(run) == []


@pytest.mark.usefixtures("stub")
def test_targets_after_one_that_fails_are_made(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Weights, "available", lambda self: "weights need what is missing.")
    with pytest.raises(UserError, match=r"^weights need what is missing\.$"):
        ship(request(run, "target=[weights,onnx]"))
    assert left(run) == WHOLE
    assert "│ onnx " in capsys.readouterr().out


@pytest.mark.slow
def test_the_error_of_a_failed_process_is_reported(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Onnx, "export", lambda self, net, example, path: path.write_bytes(b"no graph"))
    with pytest.raises(
        UserError, match=r"^target=onnx: a fresh process could not run the file \(.*can't be read as ONNX"
    ):
        ship(request(run))
    assert left(run) == []


@pytest.mark.usefixtures("here")
def test_no_file_holds_training_data_or_paths(run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of quick targets: one calibrated on training data, and an archive; test_matrix.py has the others."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # a recognisable name, unlike /tmp
    for target in ("onnx_int8", "torch_export"):
        ship(request(run, f"target={target}", "target.samples=3"))
        assert leaks(run, target, tmp_path) == []


def test_what_is_looked_for_would_be_found(mlp: RunDir, tmp_path: Path) -> None:
    data = open_export_model(mlp.path).data
    x, _ = next(iter(data.eval_loader("train")))
    torch.save({"view": x[3:4]}, tmp_path / "leak.pt")  # a view, whose whole storage is written
    assert any(needles(data)["float32 image 0"] in text for text in contents(tmp_path / "leak.pt"))
