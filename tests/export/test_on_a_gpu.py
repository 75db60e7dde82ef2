"""Files for a GPU, with the CPU in its place: every step except the copies between host and device."""

import json
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lathe.errors import UserError
from lathe.export import get, gpu
from lathe.export.targets import aot_metadata

Make = Callable[[], nn.Module]
Quantized = Callable[..., nn.Module]
aot = get("aot_inductor")


@pytest.fixture
def gpu_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(gpu.DEVICES, "cuda", torch.device("cpu"))


def written(folder: Path, **metadata: str) -> Path:
    """A package that holds only metadata."""
    with zipfile.ZipFile(folder / "net.pt2", "w") as archive:
        archive.writestr("net/data/aotinductor/model/a_metadata.json", json.dumps(metadata))
    return folder / "net.pt2"


def test_integers_are_refused(
    make_mlp: Make, images: Tensor, tmp_path: Path, quantized: Quantized, gpu_stand_in: None
) -> None:
    with pytest.raises(UserError, match=r"^device=cuda compiles floats alone"):
        aot.export(quantized(make_mlp(), images), images, tmp_path / "net.pt2", device="cuda")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("capability", "device", "said"),
    [
        (None, None, r"compiled for a GPU \(cuda\), and torch finds none here"),
        ((8, 0), None, r"for a GPU of compute capability 9.0, and this one has 8.0: export the run again, here"),
        ((9, 0), "cuda:0", None),
    ],
)
def test_where_a_package_runs(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int] | None,
    device: str | None,
    said: str | None,
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: capability is not None)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: capability)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "a GPU")
    package = written(tmp_path, compiled_device="cuda", compiled_capability="9.0")
    metadata = aot_metadata.written(package)
    if said is None:
        assert aot_metadata.placed(package, metadata, device) == torch.device("cuda:0")
    else:
        with pytest.raises(UserError, match=said):
            aot.load(package, device=device)


@pytest.mark.slow
@pytest.mark.skipif(aot.available() is not None, reason="no C++ compiler")
def test_a_package_compiled_for_a_device_computes_the_net(
    make_mlp: Make, images: Tensor, tmp_path: Path, gpu_stand_in: None
) -> None:
    net, path = make_mlp(), tmp_path / "net.pt2"
    aot.export(net, images[:1], path, device="cuda")
    assert aot_metadata.written(path)["compiled_device"] == "cpu"
    run = aot.load(path)
    with torch.no_grad():
        for batch in (64, 1, 7):
            np.testing.assert_allclose(run(images[:batch].numpy()), net(images[:batch]).numpy(), atol=1e-5)
