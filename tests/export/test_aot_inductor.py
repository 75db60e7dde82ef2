import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lathe.compression.quantize import LayerPlan
from lathe.errors import UserError
from lathe.export import get

Make = Callable[[], nn.Module]
Quantized = Callable[..., nn.Module]


def test_a_missing_compiler_is_said(make_mlp: Make, images: Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lathe.export.aot_inductor.shutil.which", lambda name: None)
    with pytest.raises(UserError, match=r"no C\+\+ compiler was found"):
        get("aot_inductor").export(make_mlp(), images, tmp_path / "net.pt2")


def test_what_can_not_be_loaded_is_said(tmp_path: Path) -> None:
    (tmp_path / "torn.pt2").write_bytes(b"torn")
    with pytest.raises(UserError, match="can't be loaded as a compiled package"):
        get("aot_inductor").load(tmp_path / "torn.pt2")


def sources(path: Path) -> str:
    with zipfile.ZipFile(path) as archive:
        return "".join(archive.read(name).decode() for name in archive.namelist() if name.endswith(".cpp"))


def in_a_fresh_process(path: Path, images: Tensor) -> np.ndarray:
    np.save(path.parent / "x.npy", images.numpy())
    code = (
        f"import torch, numpy; f = torch._inductor.aoti_load_package({str(path)!r}); import sys;"
        "numpy.save('y.npy', f(torch.from_numpy(numpy.load('x.npy'))).numpy()); assert 'lathe' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], cwd=path.parent, check=True, timeout=120)
    return np.load(path.parent / "y.npy")


@pytest.mark.slow
@pytest.mark.skipif(get("aot_inductor").available() is not None, reason="no C++ compiler")
def test_float_and_integers(make_resnet: Make, images: Tensor, tmp_path: Path, quantized: Quantized) -> None:
    net = make_resnet().train()
    get("aot_inductor").export(net, images[:1], tmp_path / "float.pt2")
    assert net.training
    with torch.no_grad():
        want = net.eval()(images).numpy()
    for batch in (1, 64):
        got = get("aot_inductor").load(tmp_path / "float.pt2", 1)(images[:batch].numpy())
        np.testing.assert_allclose(got, want[:batch], atol=1e-4)

    quantized(net, images)
    get("aot_inductor").export(net, images[:1], tmp_path / "int8.pt2")
    assert sources(tmp_path / "int8.pt2").count("qconv_pointwise") >= 9
    assert (
        "convolution"
        not in sources(tmp_path / "int8.pt2").replace("qconvolution", "").split("void AOTInductorModel::run_impl")[-1]
    )
    with torch.no_grad():
        want = net(images).numpy()
    got = in_a_fresh_process(tmp_path / "int8.pt2", images)
    assert (got.argmax(1) == want.argmax(1)).mean() >= 0.99
    assert np.abs(got - want).max() < 0.1 * want.std()


@pytest.mark.slow
@pytest.mark.skipif(get("aot_inductor").available() is not None, reason="no C++ compiler")
@pytest.mark.parametrize("plan", [LayerPlan(activation="dynamic"), LayerPlan(weight_bits=4, activation="none", group_size=32)])
def test_other_plans(make_mlp: Make, images: Tensor, tmp_path: Path, quantized: Quantized, plan: LayerPlan) -> None:
    net = quantized(make_mlp(), images, plan)
    get("aot_inductor").export(net, images[:1], tmp_path / "net.pt2")
    with torch.no_grad():
        want = net(images).numpy()
    got = get("aot_inductor").load(tmp_path / "net.pt2", 1)(images.numpy())
    np.testing.assert_allclose(got, want, atol=1e-3)
