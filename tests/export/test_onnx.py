"""target=onnx: files compute the net and contain no training data or path of this machine."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lathe.compression.quantization.net import strip
from lathe.errors import UserError
from lathe.export import get
from lathe.export.targets.onnx_graph import providers_for

pytest.importorskip("onnxruntime")
Make = Callable[[], nn.Module]


@pytest.mark.filterwarnings("ignore:`torch.jit")  # torch's modules, which the compiler imports
def test_float_file(make_mlp: Make, images: Tensor, tmp_path: Path) -> None:
    net, path = make_mlp().train(), tmp_path / "net.onnx"
    net.head.eval()
    modes = [module.training for module in net.modules()]
    net.compile()  # in place, as in a compiled run
    secret = images.clone() + 0.123456
    get("onnx").export(net, secret[3:4], path)
    assert [module.training for module in net.modules()] == modes
    assert os.listdir(tmp_path) == ["net.onnx"]

    content = path.read_bytes()
    assert str(Path.home()).encode() not in content
    assert b".py" not in content
    for row in secret.numpy().reshape(-1, 64)[:200]:
        assert row[:8].tobytes() not in content

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


def test_a_quantized_net_is_written_with_its_rounded_weights(
    make_mlp: Make, images: Tensor, tmp_path: Path, quantized: Callable[..., nn.Module]
) -> None:
    net = quantized(make_mlp(), images)
    get("onnx").export(net, images[:1], tmp_path / "net.onnx")
    with torch.no_grad():
        want = strip(net)(images).numpy()
    np.testing.assert_allclose(get("onnx").load(tmp_path / "net.onnx", 1)(images.numpy()), want, atol=1e-5)


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
