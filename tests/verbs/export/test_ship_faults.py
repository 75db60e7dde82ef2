"""Exports with wrong outputs, full disks and tampered files: what is left, and the message."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.exports import WHOLE, left, request
from torch import Tensor, nn

from lathe import export
from lathe.errors import UserError
from lathe.export.bundle import open_bundle
from lathe.export.targets import onnx
from lathe.runs.rundir import RunDir
from lathe.verbs.export import ship


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
    write = onnx.export

    def choose(kind: str) -> None:
        monkeypatch.setattr(onnx, "export", lambda net, example, path: write(Wrong(net, kind).eval(), example, path))

    return choose


@pytest.mark.usefixtures("stub")
@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        (
            "shifted",
            r"logits on held-out data differ from the module's by 0\.\d+ of the largest",
        ),
        ("nan", r"differ from the module's by nan of the largest"),
        (
            "shape",
            r"is answered with \[297, 9\] instead of \[297, 10\]",
        ),
        ("order", r"logits on held-out data differ"),
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
        UserError,
        match=r"of the held-out predictions equal the module's, below 0\.999, so nothing was exported; target\.agr",
    ):
        ship(request(run, "target.tolerance=10"))
    with pytest.raises(
        UserError,
        match=r"^target=onnx: accuracy on held-out data is 0\.\d+ and that of the run's own net 0\.\d+, worse by",
    ):
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
        UserError,
        match=r"^target=onnx can't take this net \(RuntimeError: no operator for this\): choose another target",
    ):
        ship(request(run))
    assert left(run) == []


@pytest.mark.usefixtures("stub")
def test_targets_after_one_that_fails_are_made(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(export.get("weights"), "available", lambda: "weights need what is missing.")
    with pytest.raises(UserError, match=r"^weights need what is missing\.$"):
        ship(request(run, "target=[weights,onnx]"))
    assert left(run) == WHOLE
    assert "│ onnx " in capsys.readouterr().out


@pytest.mark.slow
def test_the_error_of_a_failed_process_is_reported(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx, "export", lambda net, example, path: path.write_bytes(b"no graph"))
    with pytest.raises(
        UserError,
        match=r"^target=onnx: a fresh process could not run the file \(.*can't be read as ONNX.*, so nothing was",
    ):
        ship(request(run))
    assert left(run) == []


@pytest.mark.usefixtures("stub")
@pytest.mark.parametrize("name", ["model.onnx", "parity.json", "manifest.json"])
def test_a_tampered_export_is_refused_at_load(run: RunDir, name: str) -> None:
    ship(request(run, "target.samples=5"))
    path = run.path / "exports" / "onnx" / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content[:-20]) if name == "manifest.json" else bytes(content))
    with pytest.raises(UserError, match=r"(SHA-256 differs|can't be read as the manifest).*export the run again"):
        open_bundle(path.parent)
