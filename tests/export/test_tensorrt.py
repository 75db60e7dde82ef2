"""The graphs for TensorRT, run by ONNX Runtime; tests/gpu builds their engines."""

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
from lathe.export.targets import tensorrt
from lathe.export.targets.onnx import write
from lathe.nets import GPT

onnx: Any = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
Make = Callable[[], nn.Module]
Quantized = Callable[..., nn.Module]
load = get("onnx").load


def test_auto_chooses_the_way_by_the_net(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lathe.export.targets.tensorrt.importlib.util.find_spec", lambda name: 1)
    assert get("tensorrt", half=True).builder(quantized=False) == "torch_tensorrt"
    assert get("tensorrt").builder(quantized=True) == "onnx"
    assert get("tensorrt", through="onnx").builder(quantized=False) == "onnx"
    with pytest.raises(UserError, match="half=true does not fit a quantized net"):
        get("tensorrt", half=True).builder(quantized=True)


def test_an_engine_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(UserError, match="torch finds no NVIDIA GPU here"):
        get("tensorrt").load("net.engine")


@pytest.mark.slow
def test_symmetric_integers(make_resnet: Make, images: Tensor, tmp_path: Path, quantized: Quantized) -> None:
    net, path = quantized(make_resnet(), images), tmp_path / "net.onnx"
    write(tensorrt.prepared(net, images, half=False), images, path)
    graph = onnx.load(path).graph
    to_array = onnx.numpy_helper.to_array
    stored = {tensor.name: to_array(tensor) for tensor in graph.initializer}
    constants = [node for node in graph.node if node.op_type == "Constant"]
    stored |= {node.output[0]: to_array(node.attribute[0].t) for node in constants}
    readers = [node for node in graph.node if node.op_type in ("QuantizeLinear", "DequantizeLinear")]
    # inputs and weights of ten layers, both sides of three sums; layers also read three of these
    assert len(readers) == 10 * 3 + 3 * 4 - 3 * 2
    for node in readers:
        assert stored[node.input[2]].dtype == np.int8
        assert (stored[node.input[2]] == 0).all()
    assert not any(array.dtype in (np.uint8, np.int32) for array in stored.values())
    np.testing.assert_array_equal(stored["head.integers"], integer_weight(net.head)[0].numpy())
    source = net.blocks[0].conv2.input_quantizer
    wanted = float(source.scale) * 255 / 127  # after a ReLU half of the values are never used
    assert any(array.ndim == 0 and np.isclose(array, wanted, rtol=1e-6, atol=0) for array in stored.values())
    forward = load(path, 1)
    for batch in (1, 5, 64):
        with torch.no_grad():
            want = net(images[:batch]).numpy()
        got = forward(images[:batch].numpy())
        assert (got.argmax(1) == want.argmax(1)).mean() >= 0.97
        assert np.abs(got - want).max() < 0.1 * np.abs(want).max()


def test_few_bits_keep_their_ranges(make_mlp: Make, images: Tensor, tmp_path: Path, quantized: Quantized) -> None:
    net = quantized(make_mlp(), images, LayerPlan(weight_bits=4, activation_bits=4))
    write(tensorrt.prepared(net, images, half=False), images, tmp_path / "net.onnx")
    with torch.no_grad():
        want = net(images).numpy()
    got = load(tmp_path / "net.onnx", 1)(images.numpy())
    rows = np.abs(got - want).max(1)
    assert np.quantile(rows, 0.25) < 1e-6  # exact, except if a value rounds the other way
    assert rows.max() < 0.15 * np.abs(want).max()


def test_token_ids(quantized: Quantized) -> None:
    torch.manual_seed(0)
    ids = torch.randint(0, 64, (16, 12))
    gpt = quantized(GPT(vocab_size=64, max_length=16, width=32, depth=1, heads=2).eval(), ids)
    found = tensorrt.prepared(gpt, ids, half=False)
    assert type(found.embed.token) is nn.Embedding
    torch.testing.assert_close(found.embed.token.weight, gpt.embed.token.weight_quantizer(gpt.embed.token.weight))


def test_half_is_in_the_graph(make_mlp: Make, tmp_path: Path) -> None:
    net = Shipped(make_mlp(), Preprocess([0.5] * 3, [0.25] * 3, (16, 16), (24, 24)))
    pixels = torch.randint(0, 256, (33, 3, 24, 24), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    write(tensorrt.prepared(net, pixels, half=True), pixels, tmp_path / "net.onnx")
    assert next(net.parameters()).dtype == torch.float32
    stored = {tensor.name: tensor.data_type for tensor in onnx.load(tmp_path / "net.onnx").graph.initializer}
    assert stored["net.head.weight"] == onnx.TensorProto.FLOAT16
    with torch.no_grad():
        want = net(pixels).numpy()
    got = load(tmp_path / "net.onnx", 1)(pixels.numpy())
    assert got.dtype == np.float32
    assert 0 < np.abs(got - want).max() < 0.02 * np.abs(want).max()
