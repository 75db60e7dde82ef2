"""target=aot_inductor: compiled packages compute the net, in floats and in integers."""

import json
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lathe.compression.quantization.net import LayerPlan
from lathe.errors import UserError
from lathe.export import get, torch_runner
from lathe.export.inputs import Preprocess, Shipped
from lathe.export.targets import aot_inductor
from lathe.nets import GPT

Make = Callable[[], nn.Module]
Quantized = Callable[..., nn.Module]
aot = get("aot_inductor")
compiled = [pytest.mark.slow, pytest.mark.skipif(aot.available() is not None, reason="no C++ compiler")]


def test_a_torn_package_is_refused(tmp_path: Path) -> None:
    (tmp_path / "torn.pt2").write_bytes(b"torn")
    with pytest.raises(UserError, match="can't be loaded as a compiled package"):
        aot.load(tmp_path / "torn.pt2")


class Package:
    """A stand-in for a package: returns the sum of each sample."""

    def __init__(self, **metadata: str) -> None:
        self.metadata = metadata

    def get_metadata(self) -> dict[str, str]:
        return self.metadata

    def __call__(self, x: Tensor) -> Tensor:
        return x.flatten(1).sum(1)


IMAGES = {"input_dtype": "uint8", "input_smallest": "1 1 2 2", "input_largest": "-1 1 2 4", "input_values": "-1"}


Opened = Callable[[dict[str, str]], Callable[[np.ndarray], np.ndarray]]


@pytest.fixture
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Opened:
    def make(metadata: dict[str, str]) -> Callable[[np.ndarray], np.ndarray]:
        (tmp_path / "model.pt2").touch()
        monkeypatch.setattr("torch._inductor.aoti_load_package", lambda path, device_index: Package(**metadata))
        return aot.load(tmp_path / "model.pt2", 1)

    return make


def test_inputs_that_were_not_compiled_for_are_refused(opened: Opened) -> None:
    run, pixels = opened(IMAGES), np.ones((3, 1, 2, 3), dtype=np.uint8)
    assert run(pixels).tolist() == [6, 6, 6]
    takes = r"model.pt2 takes uint8 of shape \[1 to any, 1, 2, 2 to 4\], not "
    with pytest.raises(UserError, match=takes + r"float32 of shape \[3, 1, 2, 3\]"):
        run(pixels.astype(np.float32))
    for wrong in (pixels[0], pixels[:0], pixels[..., :1], np.repeat(pixels, 2, 3), np.repeat(pixels, 3, 1)):
        with pytest.raises(UserError, match=takes + "uint8"):
            run(wrong)


def test_packages_for_others_are_refused(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"does not say what it takes, so Lathe did not make it"):
        opened({"AOTI_DEVICE_KEY": "cpu"})
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: "AVX2")
    with pytest.raises(UserError, match=r"was compiled for a CPU with AVX512, which this one lacks"):
        opened({**IMAGES, "AOTI_CPU_ISA": "AVX512 AVX512_VNNI"})
    monkeypatch.setattr(aot_inductor, "sums_are_exact", lambda: False)
    with pytest.raises(UserError, match=r"for a CPU that sums products of 8-bit integers exactly \(VNNI\), unlike"):
        opened({**IMAGES, "exact_sums": "1"})
    opened({**IMAGES, "exact_sums": "0"})


@pytest.fixture
def sources(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The generated C++ of each package, which itself has only the files' names."""
    found: list[str] = []
    original = aot_inductor._compiled

    def spy(*given: Any) -> list[Any]:
        files = original(*given)
        found.append("".join(Path(file).read_text() for file in map(str, files) if file.endswith(".cpp")))
        return files

    monkeypatch.setattr(aot_inductor, "_compiled", spy)
    return found


def outputs(net: nn.Module, inputs: Tensor) -> np.ndarray:
    with torch.no_grad():
        return np.asarray(net.eval()(inputs))


class TestFloats:
    pytestmark = compiled

    def test_pixels(self, tmp_path: Path, sources: list[str]) -> None:
        torch.manual_seed(0)
        convolutions = (nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, 2))
        inner = nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(392, 10))
        net = Shipped(inner, Preprocess([0.4, 0.5, 0.6], [0.2, 0.2, 0.3], (16, 16)))
        inner.train()
        pixels = torch.randint(0, 256, (64, 3, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))
        path = tmp_path / "float.pt2"
        aot.export(net, pixels[:1], path)
        assert inner.training
        assert len(set(re.findall(r"_packed_convolution_\d+", sources[0]))) == 2
        assert [file.name for file in tmp_path.iterdir()] == ["float.pt2"]

        want, given, threads = outputs(net, pixels), pixels.numpy(), torch.get_num_threads()
        for number in (1, 2, None):
            run = aot.load(path, number)
            for batch in (1, 64):
                np.testing.assert_allclose(run(given[:batch]), want[:batch], atol=1e-5)
            assert torch.get_num_threads() == threads
        backwards = np.frombuffer(given.tobytes(), np.uint8).reshape(given.shape)[::-1]  # read-only and not contiguous
        np.testing.assert_allclose(run(backwards), want[::-1], atol=1e-5)
        parts = [slice(index, index + 1 + index % 3) for index in range(60)]
        with ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(lambda part: run(given[part]), parts))
        for part, answer in zip(parts, answers, strict=True):
            np.testing.assert_allclose(answer, want[part], atol=1e-5)

    def test_pictures_of_every_size(self, tmp_path: Path) -> None:
        torch.manual_seed(0)
        # of one channel, whose layout a packed convolution would change
        inner = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(256, 5))
        net = Shipped(inner, Preprocess([0.4], [0.2], (8, 8), "any"))
        aot.export(net, torch.zeros(2, 1, 8, 8, dtype=torch.uint8), tmp_path / "any.pt2")
        run = aot.load(tmp_path / "any.pt2", 1)
        for shape in ((1, 1, 8, 8), (3, 1, 20, 11), (2, 1, 1, 1), (1, 1, 3, 100)):
            pixels = torch.randint(0, 256, shape, dtype=torch.uint8)
            np.testing.assert_allclose(run(pixels.numpy()), outputs(net, pixels), atol=1e-5)

    def test_tokens(self, tmp_path: Path) -> None:
        torch.manual_seed(0)
        net = GPT(vocab_size=50, max_length=16, width=16, depth=1, heads=2).eval()
        aot.export(net, torch.zeros(2, 16, dtype=torch.int64), tmp_path / "gpt.pt2")
        run = aot.load(tmp_path / "gpt.pt2", 1)
        for shape in ((1, 16), (3, 1), (1, 1), (2, 7)):
            ids = torch.randint(0, 50, shape)
            np.testing.assert_allclose(run(ids.numpy()), outputs(net, ids), atol=1e-5)


class TestIntegers:
    pytestmark = compiled

    def test_a_resnet(
        self, make_resnet: Make, images: Tensor, tmp_path: Path, quantized: Quantized, sources: list[str]
    ) -> None:
        net = quantized(make_resnet(), images)
        aot.export(net, images[:1], tmp_path / "int8.pt2")
        if aot_inductor.sums_are_exact():
            assert sources[0].count("qconv_pointwise") >= 9
            body = sources[0].split("void AOTInductorModel::run_impl")[-1]
            assert "convolution" not in body.replace("qconvolution", "")
        else:
            assert "qconv_pointwise" not in sources[0]
        np.save(tmp_path / "x.npy", images.numpy())
        code = (  # without Lathe
            "import torch, numpy; f = torch._inductor.aoti_load_package('int8.pt2');"
            "numpy.save('y.npy', f(torch.from_numpy(numpy.load('x.npy'))).numpy())"
        )
        subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, timeout=120)
        want, got = outputs(net, images), np.load(tmp_path / "y.npy")
        assert (got.argmax(1) == want.argmax(1)).mean() >= 0.99
        assert np.abs(got - want).max() < 0.1 * want.std()

    def test_what_is_not_summed_exactly_is_floats(
        self,
        make_mlp: Make,
        images: Tensor,
        tmp_path: Path,
        quantized: Quantized,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
        sources: list[str],
    ) -> None:
        """Products of 4-bit weights fit into 16 bits in pairs, those of 8-bit weights don't."""
        monkeypatch.setattr(aot_inductor, "sums_are_exact", lambda: False)
        net, path = quantized(make_mlp(), images, head=LayerPlan(weight_bits=4)), tmp_path / "net.pt2"
        aot.export(net, images[:1], path)
        assert "qlinear_pointwise" in sources[0]
        assert "2 of 3 quantized layers" in caplog.text
        np.testing.assert_allclose(aot.load(path, 1)(images.numpy()), outputs(net, images), atol=1e-3)


# Files for a GPU, with the CPU in its place: every step except the copies between host and device.


@pytest.fixture
def gpu_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(torch_runner.DEVICES, "cuda", torch.device("cpu"))


def test_integers_are_refused(
    make_mlp: Make, images: Tensor, tmp_path: Path, quantized: Quantized, gpu_stand_in: None
) -> None:
    with pytest.raises(UserError, match=r"^device=cuda compiles floats alone"):
        get("aot_inductor", device="cuda").export(quantized(make_mlp(), images), images, tmp_path / "net.pt2")
    assert not list(tmp_path.iterdir())


def test_where_a_package_for_a_gpu_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "net.pt2"
    with zipfile.ZipFile(package, "w") as archive:
        metadata = {"compiled_device": "cuda", "compiled_capability": "9.0"}
        archive.writestr("net/data/aotinductor/model/a_metadata.json", json.dumps(metadata))
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(UserError, match=r"compiled for a GPU \(cuda\), and torch finds none here"):
        aot.load(package)
    capability = [(8, 0), (9, 0)]
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: capability.pop(0))
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "a GPU")
    with pytest.raises(UserError, match=r"for a GPU of compute capability 9.0, and this one has 8.0: export the run"):
        aot.load(package)
    device = aot_inductor.placed(package, aot_inductor.read_metadata(package), "cuda:0")
    assert device == torch.device("cuda:0")


@pytest.mark.slow
@pytest.mark.skipif(aot.available() is not None, reason="no C++ compiler")
def test_a_package_compiled_for_a_device_computes_the_net(
    make_mlp: Make, images: Tensor, tmp_path: Path, gpu_stand_in: None
) -> None:
    net, path = make_mlp(), tmp_path / "net.pt2"
    get("aot_inductor", device="cuda").export(net, images[:1], path)
    assert aot_inductor.read_metadata(path)["compiled_device"] == "cpu"
    run = aot.load(path)
    for batch in (64, 1, 7):
        np.testing.assert_allclose(run(images[:batch].numpy()), outputs(net, images[:batch]), atol=1e-5)
