"""target=onnx and onnx_int8: files compute the net, and hold no training data or path of this machine."""

import os
import subprocess
import sys
from collections import Counter
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
from lathe.export.targets.onnx import EXACT, open_session, providers_for

onnx: Any = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
Make = Callable[[], nn.Module]
Quantized = Callable[..., nn.Module]


@pytest.mark.filterwarnings("ignore:`torch.jit")  # torch's modules, which the compiler imports
def test_float_file(make_mlp: Make, images: Tensor, tmp_path: Path) -> None:
    net, path = make_mlp().train(), tmp_path / "net.onnx"
    net.head.eval()
    modes = [module.training for module in net.modules()]
    net.compile()  # in place, as in a compiled run
    get("onnx").export(net, images[3:4], path)
    assert [module.training for module in net.modules()] == modes
    assert os.listdir(tmp_path) == ["net.onnx"]
    forward = get("onnx").load(path, threads=1)
    for batch in (1, 2, 5, 64):
        with torch.no_grad():
            want = make_mlp()(images[:batch]).numpy()
        np.testing.assert_allclose(forward(images[:batch].numpy()), want, atol=1e-5)

    # in a process without Lathe
    np.save(tmp_path / "x.npy", images[:5].numpy())
    code = (
        "import onnxruntime, numpy; s = onnxruntime.InferenceSession('net.onnx', providers=['CPUExecutionProvider']);"
        "numpy.save('y.npy', s.run(None, {'input': numpy.load('x.npy')})[0])"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, timeout=60)
    np.testing.assert_array_equal(np.load(tmp_path / "y.npy"), forward(images[:5].numpy()))


def test_a_torn_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "torn.onnx").write_bytes(b"torn")
    with pytest.raises(UserError, match="can't be read as ONNX"):
        get("onnx").load(tmp_path / "torn.onnx")


def test_providers_of_a_gpu_compute_float32_and_are_never_left_out_in_silence() -> None:
    cpu, cuda = "CPUExecutionProvider", "CUDAExecutionProvider"
    assert providers_for(None, [cuda, cpu]) == providers_for("cpu", [cpu]) == [cpu]
    assert providers_for("cuda:2", [cuda, cpu]) == [(cuda, {"device_id": 2, "use_tf32": 0}), cpu]
    with pytest.raises(UserError, match="onnxruntime has no CUDA provider here"):
        providers_for("cuda:0", [cpu])


def operators(path: Path) -> Counter[str]:
    """Return the operators of a file after ONNX Runtime's optimization."""
    made = path.with_suffix(".optimized.onnx")
    open_session(path, 1, optimized_model_filepath=str(made))
    return Counter(node.op_type for node in onnx.load(made).graph.node)


def agreement(net: nn.Module, path: Path, inputs: Tensor) -> tuple[float, float]:
    """Return the share of equal predictions, and the largest difference in the outputs' standard deviations."""
    with torch.no_grad():
        want = net(inputs).numpy()
    got = get("onnx_int8").load(path, 1)(inputs.numpy())
    return float((got.argmax(-1) == want.argmax(-1)).mean()), float(np.abs(got - want).max() / want.std())


@pytest.fixture(scope="module")
def exported(
    make_resnet: Make, quantized: Quantized, make_images: Callable[[], Tensor], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Any, Path]:
    """A quantized residual net, and its file in a folder."""
    net, path, images = make_resnet(), tmp_path_factory.mktemp("resnet") / "net.onnx", make_images()
    with torch.no_grad():
        net.blocks[1].conv1.weight[net.blocks[1].conv1.weight.abs() < 0.05] = 0  # as after pruning
    quantized(net, images)
    get("onnx_int8").export(net, images[:1], path)
    assert os.listdir(path.parent) == ["net.onnx"]
    return net, path


def test_a_resnet_runs_in_integers_from_end_to_end(exported: tuple[Any, Path], images: Tensor) -> None:
    net, path = exported
    found = operators(path)
    assert found["QLinearConv"] == 9
    assert found["QGemm"] == 1
    assert found["QLinearAdd"] == 2  # the third has no range and is averaged in float
    assert not found.keys() & {"Conv", "FusedConv", "Gemm", "MatMul", "BatchNormalization"}

    same, difference = agreement(net, path, images)
    assert same >= 0.99
    assert difference < 0.1
    for batch in (1, 3):
        assert agreement(net, path, images[:batch])[0] == 1.0

    graph = onnx.load(path).graph
    stored = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in graph.initializer}
    masked = stored["blocks.1.conv1.integers"]
    assert masked.dtype == np.int8
    integers = integer_weight(net.blocks[1].conv1)[0].numpy()
    np.testing.assert_array_equal(np.abs(masked), np.abs(integers))
    assert (masked[net.blocks[1].conv1.weight.detach().numpy() == 0] == 0).all()
    assert (masked == 0).mean() > 0.2
    np.testing.assert_array_equal(stored["head.integers"], integer_weight(net.head)[0].numpy())
    # layers share no zero point of weights, which ONNX Runtime could not load with exact sums and without VNNI
    zeros = [node.input[2] for node in graph.node if node.op_type == "DequantizeLinear"]
    zeros = [name for name in zeros if name in stored and stored[name].dtype == np.int8]
    assert len(zeros) == len(set(zeros)) == 10


@pytest.mark.parametrize("vnni", [True, False])
def test_exact_sums_are_asked_for_where_they_are_not_the_processors_own(
    exported: Any, images: Tensor, monkeypatch: pytest.MonkeyPatch, vnni: bool
) -> None:
    """With VNNI the option costs more than twice the time and changes nothing."""
    import onnxruntime

    real, exact, path = onnxruntime.InferenceSession, [], exported[1]
    plain = real(str(path), providers=["CPUExecutionProvider"])
    own = torch.cpu._is_vnni_supported()

    def session(path: str, settings: Any, **options: Any) -> Any:
        try:
            exact.append(settings.get_session_config_entry(EXACT))
        except RuntimeError:  # it is not set
            exact.append(None)
        return real(path, settings, **options)

    monkeypatch.setattr(onnxruntime, "InferenceSession", session)
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: vnni)
    found = get("onnx_int8").load(path, 1)(images.numpy())
    assert exact == [None if vnni else "1"]
    if own:
        assert np.array_equal(found, plain.run(None, {"input": images.numpy()})[0])


def test_dynamic_ranges(make_mlp: Make, images: Tensor, tmp_path: Path, quantized: Quantized) -> None:
    net, path = quantized(make_mlp(), images, LayerPlan(activation="dynamic")), tmp_path / "net.onnx"
    get("onnx_int8").export(net, images[:1], path)
    assert operators(path)["DynamicQuantizeMatMul"] == 3
    for batch in (1, 64):
        same, difference = agreement(net, path, images[:batch])
        assert same >= 0.99
        assert difference < 0.01


@pytest.mark.parametrize("group_size", [None, 32])
def test_weights_alone(
    make_mlp: Make, images: Tensor, tmp_path: Path, quantized: Quantized, group_size: int | None
) -> None:
    plan = LayerPlan(weight_bits=4, activation="none", group_size=group_size)
    net, path = quantized(make_mlp(), images, plan), tmp_path / "net.onnx"
    get("onnx_int8").export(net, images[:1], path)
    found = operators(path)
    assert found["Gemm"] + found["FusedGemm"] == 3
    assert not found["DequantizeLinear"]  # dequantized once, when the file is loaded
    same, difference = agreement(net, path, images)
    assert same == 1.0
    assert difference < 1e-4


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_a_file_in_float16_has_half_of_the_bytes(make_mlp: Make, images: Tensor, tmp_path: Path) -> None:
    sizes = {}
    for name in ("onnx", "onnx_fp16"):
        get(name).export(make_mlp(), images[:2], tmp_path / name)
        forward, sizes[name] = get(name).load(tmp_path / name, threads=1), (tmp_path / name).stat().st_size
    outputs = forward(images[:5].numpy())
    with torch.no_grad():
        expected = make_mlp()(images[:5]).numpy()
    assert outputs.dtype == np.float32
    assert 0 < np.abs(outputs - expected).max() < 2e-3 * np.abs(expected).max()
    assert sizes["onnx_fp16"] < 0.55 * sizes["onnx"]
    stored = {tensor.data_type for tensor in onnx.load(tmp_path / "onnx_fp16").graph.initializer}
    assert onnx.TensorProto.FLOAT16 in stored
    assert onnx.TensorProto.FLOAT not in stored
