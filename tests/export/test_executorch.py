"""target=executorch: programs compute the net, in floats and in XNNPACK's integers."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lathe.compression.quantization.net import LayerPlan, integer_weight
from lathe.errors import UserError
from lathe.export import get
from lathe.export.inputs import Preprocess, Shipped
from lathe.export.targets import executorch as module
from lathe.nets import GPT

pytest.importorskip("executorch")
Make = Callable[[], nn.Module]
Quantized = Callable[..., nn.Module]
executorch = get("executorch")


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The operators that each export's partitioning delegated to XNNPACK."""
    found: list[Any] = []
    real = module._check_layers

    def check(layers: Any, quantized: bool) -> None:
        found.append(layers)
        real(layers, quantized)

    monkeypatch.setattr(module, "_check_layers", check)
    return found


def differences(
    net: nn.Module, path: Path, inputs: Tensor, batches: tuple[int, ...] = (1, 2, 3, 7, 16, 33)
) -> tuple[float, float]:
    """Return over all batches the least share of equal predictions, and the largest relative difference."""
    forward, agreement, largest = executorch.load(path, 1), 1.0, 0.0
    for batch in batches:
        with torch.no_grad():
            want = net(inputs[:batch]).numpy()
        got = forward(inputs[:batch].numpy())
        assert got.shape == want.shape
        agreement = min(agreement, float((got.argmax(-1) == want.argmax(-1)).mean()))
        largest = max(largest, float(np.abs(got - want).max() / np.abs(want).max()))
    return agreement, largest


@pytest.mark.slow
def test_pixels_and_integers(
    make_mlp: Make, images: Tensor, tmp_path: Path, quantized: Quantized, counted: list[Any]
) -> None:
    path, inner = tmp_path / "net.pte", make_mlp()
    net = Shipped(inner, Preprocess([0.5] * 3, [0.25] * 3, (16, 16)))
    inner.train()
    get("executorch", max_batch_size=20).export(net, torch.zeros(1, 3, 16, 16, dtype=torch.uint8), path)
    assert inner.training
    assert os.listdir(tmp_path) == ["net.pte"]
    assert (counted[0].integers, counted[0].floats, counted[0].left) == (0, 3, [])
    pixels = torch.randint(0, 256, (50, 3, 16, 16), generator=torch.Generator().manual_seed(4), dtype=torch.uint8)
    agreement, largest = differences(net.eval(), path, pixels, (1, 2, 19, 20, 21, 50))  # more than 20 in parts
    assert agreement == 1
    assert largest < 1e-5

    forward = executorch.load(path, 1)
    for wrong in (pixels[:0], pixels[0], pixels[:, :, :8], pixels.float()):
        with pytest.raises(UserError, match=r"takes uint8 of shape \[batch, 3, 16, 16\]"):
            forward(wrong.numpy())

    small = make_mlp()
    quantized(small, images)
    executorch.export(small, images[:1], tmp_path / "int8.pte")
    assert (counted[1].integers, counted[1].floats, counted[1].left) == (3, 0, [])
    agreement, largest = differences(small, tmp_path / "int8.pte", images)
    assert agreement >= 0.97
    assert largest < 0.01
    stored = (tmp_path / "int8.pte").read_bytes()
    assert len(stored) < 0.35 * sum(4 * p.numel() for p in small.parameters())
    assert integer_weight(small.head)[0].numpy().tobytes() in stored  # the integers of training
    path.write_bytes(b"torn")
    with pytest.raises(UserError, match="can't be read as an ExecuTorch program"):
        executorch.load(path)


def test_pictures_of_any_size_are_refused(make_mlp: Make, images: Tensor, tmp_path: Path) -> None:
    anything = Shipped(make_mlp(), Preprocess([0.5] * 3, [0.25] * 3, (16, 16), "any"))
    with pytest.raises(UserError, match=r"target\.input_size=any"):
        executorch.export(anything, images.byte(), tmp_path / "net.pte")


def test_too_much_memory_is_refused(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Embedding(8, 8), nn.Linear(8, 2048)).eval()
    with pytest.raises(UserError, match=r"max_batch_size=2000 reserves \d\.\d GiB whenever the file is loaded"):
        get("executorch", max_batch_size=2000).export(net, torch.zeros(1, 256, dtype=torch.int64), tmp_path / "net.pte")


@pytest.mark.slow
def test_a_resnet_in_a_fresh_process(
    make_resnet: Make, images: Tensor, tmp_path: Path, quantized: Quantized, counted: list[Any]
) -> None:
    net, path = make_resnet(), tmp_path / "net.pte"
    with torch.no_grad():
        net.blocks[0].conv2.weight[3] = 0  # a pruned channel: only its bias is left
    quantized(net, images)
    executorch.export(net, images[:1], path)
    assert (counted[0].integers, counted[0].floats, counted[0].left) == (10, 0, [])
    agreement, largest = differences(net, path, images)
    assert agreement >= 0.97
    assert largest < 0.02

    np.save(tmp_path / "x.npy", images.numpy())
    code = (
        "import numpy, sys; from lathe.export import get; numpy.save('y.npy', "
        "get('executorch').load('net.pte', 1)(numpy.load('x.npy'))); assert 'lathe.nets' not in sys.modules"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, check=True, timeout=120, capture_output=True, text=True)
    assert done.stderr == ""
    np.testing.assert_array_equal(np.load(tmp_path / "y.npy"), executorch.load(path, 1)(images.numpy()))


@pytest.mark.slow
def test_sequences_of_every_length(tmp_path: Path, quantized: Quantized, counted: list[Any]) -> None:
    torch.manual_seed(0)
    path, gpt = tmp_path / "net.pte", GPT(vocab_size=64, max_length=16, width=32, depth=1, heads=2).eval()
    ids = torch.randint(0, 64, (70, 12))
    quantized(gpt, ids)
    executorch.export(gpt, ids[:1], path)
    forward = executorch.load(path, 1)
    for batch, time in ((1, 1), (3, 5), (64, 12), (70, 2)):
        with torch.no_grad():
            want = gpt(ids[:batch, :time]).numpy()
        assert np.abs(forward(ids[:batch, :time].numpy()) - want).max() < 0.1 * np.abs(want).max()
    with pytest.raises(UserError, match=r"takes int64 of shape \[batch, up to 12\]"):
        forward(np.zeros((1, 13), dtype=np.int64))
    assert [(found.integers, found.floats, found.left) for found in counted] == [(7, 0, [])]


@pytest.mark.slow
def test_other_plans(make_mlp: Make, images: Tensor, tmp_path: Path, quantized: Quantized, counted: list[Any]) -> None:
    net = quantized(
        make_mlp(), images, LayerPlan(weight_bits=4, activation_bits=4), head=LayerPlan(activation="dynamic")
    )
    executorch.export(net, images[:1], tmp_path / "net.pte")
    assert (counted[0].integers, counted[0].floats, counted[0].left) == (3, 0, [])
    assert differences(net, tmp_path / "net.pte", images)[1] < 0.15
