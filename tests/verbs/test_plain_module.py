"""`lathe.compress` and `lathe.export_module`: any module from Python."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from support.documented import blocks
from support.runs import ROOT
from torch import Tensor, nn

import lathe
import lathe.export
from lathe.compression.quantization import quantized_layers
from lathe.errors import UserError


class Two(nn.Module):
    """Takes two arguments, one by keyword, and returns a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.ReLU())
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor, scale: Tensor) -> dict[str, Tensor]:
        return {"logits": self.head(self.body(x).mean((2, 3))) * scale.view(-1, 1)}


@pytest.fixture
def net() -> Two:
    torch.manual_seed(0)
    return Two()


def example(n: int = 32) -> dict[str, Tensor]:
    return {"x": torch.randn(n, 1, 8, 8, generator=torch.Generator().manual_seed(1)), "scale": torch.ones(n)}


def fit(net: nn.Module) -> None:
    """Train with momentum and weight decay, which would revive masked weights."""
    optimizer = torch.optim.AdamW(net.parameters(), 0.01, weight_decay=0.1)
    inputs = example()
    targets = inputs["x"].mean((1, 2, 3)).gt(0).long()
    for _ in range(5):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(**inputs)["logits"], targets).backward()
        optimizer.step()


def test_masks_hold_while_the_loop_trains_and_rounds(net: Two) -> None:
    """Half of the weights are zero after momentum and decay."""
    before = copy.deepcopy(net)
    small = lathe.compress(net, {"prune": {"sparsity": 0.5}, "qat": {}}, example(), fit)
    assert small is net
    assert not torch.equal(net.head.weight, before.head.weight)
    convolutions = torch.cat([net.body[i].weight.flatten() for i in (0, 3)])
    assert float((convolutions == 0).float().mean()) == pytest.approx(0.5, abs=0.01)
    assert net.training


@pytest.mark.slow
def test_a_quantized_module_is_written_in_integers(net: Two, tmp_path: Path) -> None:
    """For any batch, with arguments by keyword."""
    lathe.compress(net, "qat", example(), fit)
    report = lathe.export_module(net, example(), tmp_path / "net.onnx")
    assert (report["target"], report["relative"] < 0.02) == ("onnx_int8", True)
    run = lathe.export.get("onnx_int8").load(tmp_path / "net.onnx")
    found = run(*(value.numpy() for value in example(7).values()))
    expected = net.eval()(**example(7))["logits"].detach().numpy()
    assert np.abs(found - expected).max() < 0.02 * np.abs(expected).max()


def test_channels_are_removed_and_ranges_calibrated(net: Two, tmp_path: Path) -> None:
    """A loop that only feeds the module: its calls give BatchNorm's statistics and the ranges. The weights reopen."""

    def feed(net: nn.Module) -> None:
        with torch.no_grad():
            net.eval()(**example())

    dense = copy.deepcopy(net)
    lathe.compress(net, {"prune_channels": {"share": 0.5}, "ptq_static": {"batches": 2}}, example(), feed)
    assert net.body[0].out_channels < 16
    assert len(quantized_layers(net)) == 3
    assert float(net.body[1].running_mean.abs().sum()) > 0
    lathe.export_module(net, example(), tmp_path / "net.safetensors")
    again = lathe.restore(dense, tmp_path / "net.safetensors").eval()
    assert torch.equal(again(**example())["logits"], net.eval()(**example())["logits"])


def test_a_module_that_draws_is_not_exported(tmp_path: Path) -> None:
    class Noisy(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + torch.rand(())

    with pytest.raises(UserError, match="Noisy draws random numbers"):
        lathe.export_module(Noisy(4, 2), torch.zeros(2, 4), tmp_path / "net.pt2")
    assert list(tmp_path.iterdir()) == []


def test_what_cant_be_done_is_refused(net: Two) -> None:
    for methods, loop, sentence in (
        ("distill", fit, "distill needs a run"),
        ({"prune": {"start": 0.1}}, fit, "prune.start: the options are sparsity"),
        ("qat", None, "give `loop`"),
        (["qat", "weight_only"], fit, "would quantize twice"),
        ("ptq_static", lambda net: None, "loop does not call the Two"),
    ):
        with pytest.raises(UserError, match=sentence):
            lathe.compress(net, methods, example(), loop)


def test_the_script_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    code = next(text for text in blocks(ROOT / "docs" / "python.md", "python") if "lathe.compress" in text)
    names: dict[str, Any] = {}
    exec(code, names)
    assert float((names["net"][0].weight == 0).float().mean()) == pytest.approx(0.5, abs=0.01)
    found: Any = onnxruntime.InferenceSession("net.onnx").run(None, {"input": names["x"].numpy()})[0]
    assert (found.argmax(1) == names["y"].numpy()).mean() > 0.9
