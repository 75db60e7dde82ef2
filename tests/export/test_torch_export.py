"""target=torch_export: programs compute the net on arrays; hostile archives are not executed."""

import io
import struct
import subprocess
import sys
import warnings
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lathe.compression.quantization.net import LayerPlan
from lathe.data import Normalizer
from lathe.errors import UserError
from lathe.export import get
from lathe.export.inputs import Preprocess, Shipped
from lathe.export.torch_runner import on_arrays, prepared
from lathe.nets import GPT, ViT

Make = Callable[[], nn.Module]
Quantized = Callable[..., nn.Module]
target = get("torch_export")


def shipped(net: nn.Module, input_size: str | None = None) -> nn.Module:
    return Shipped(net, Preprocess([0.5] * 3, [0.25] * 3, (16, 16), input_size))


def pixels(batch: int, height: int = 16, width: int = 16) -> Tensor:
    seeded = torch.Generator().manual_seed(batch)
    return torch.randint(0, 256, (batch, 3, height, width), generator=seeded, dtype=torch.uint8)


def largest_error(path: Path, net: nn.Module, inputs: list[Tensor]) -> float:
    """Return the largest error of the file's outputs, which have the net's shape."""
    run, errors = target.load(path, 1), []
    for x in inputs:
        with torch.no_grad():
            want, got = net(x).numpy(), run(x.numpy())
        assert got.shape == want.shape
        errors.append(float(np.abs(got - want).max()))
    return max(errors)


def test_inputs_of_every_size(make_resnet: Make, make_mlp: Make, tmp_path: Path) -> None:
    torch.manual_seed(0)
    vit = ViT(channels=3, image_size=16, num_classes=10, patch_size=4, width=16, depth=1, heads=2, pool="token").eval()
    gpt = GPT(vocab_size=64, max_length=16, width=16, depth=1, heads=2).eval()
    ids = [torch.randint(0, 64, shape) for shape in ((1, 1), (5, 7), (1, 16))]
    for net, example, inputs in (
        (shipped(make_resnet()), pixels(4), [pixels(batch) for batch in (1, 2, 7)]),
        (shipped(vit), pixels(1), [pixels(1), pixels(5)]),
        (shipped(make_mlp(), "any"), pixels(2), [pixels(1, 9, 30), pixels(3, 40, 16)]),
        (gpt, torch.zeros(2, 16, dtype=torch.int64), ids),
    ):
        target.export(net, example, tmp_path / "model.pt2")
        assert largest_error(tmp_path / "model.pt2", net, inputs) <= 1e-6


def test_the_same_net_gives_the_same_bytes(make_mlp: Make, images: Tensor, tmp_path: Path) -> None:
    path, again = tmp_path / "model.pt2", tmp_path / "again.pt2"
    net = make_mlp().train()
    target.export(net, images, path)
    target.export(net, images, again)
    assert net.training
    assert path.read_bytes() == again.read_bytes()
    with zipfile.ZipFile(path) as archive:
        assert archive.getinfo("archive/data/sample_inputs/model.pt").file_size == 0


def test_integers_are_stored_as_such(make_mlp: Make, images: Tensor, tmp_path: Path, quantized: Quantized) -> None:
    check_integers(quantized(make_mlp(), images), images, tmp_path)
    net = quantized(make_mlp(), images, LayerPlan(activation="dynamic"))
    target.export(net, images[:1], tmp_path / "net.pt2")
    assert largest_error(tmp_path / "net.pt2", net, [images]) <= 1e-3  # the batch determines the ranges


@pytest.mark.slow
def test_integers_of_convolutions(make_resnet: Make, images: Tensor, tmp_path: Path, quantized: Quantized) -> None:
    check_integers(quantized(make_resnet(), images), images, tmp_path)
    np.save(tmp_path / "x.npy", images.numpy())
    code = (  # without Lathe
        "import torch, numpy, torch.ao.quantization.fx._decomposed; f = torch.export.load('int8.pt2').module();"
        "numpy.save('y.npy', f(torch.from_numpy(numpy.load('x.npy'))).numpy())"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, timeout=120)
    np.testing.assert_array_equal(np.load(tmp_path / "y.npy"), target.load(tmp_path / "int8.pt2")(images.numpy()))


def check_integers(net: nn.Module, images: Tensor, folder: Path) -> None:
    path = folder / "int8.pt2"
    target.export(net, images[:1], path)
    assert largest_error(path, net, [images[:1], images[:7]]) <= 1e-5
    with zipfile.ZipFile(path) as archive:
        graph = archive.read("archive/models/model.json").decode()
        tensors = sum(entry.file_size for entry in archive.infolist() if "/data/weights/weight_" in entry.filename)
    layers = [module for module in net.modules() if isinstance(module, nn.Conv2d | nn.Linear)]
    assert graph.count("torch.ops.quantized_decomposed.dequantize_per_channel.default") == len(layers)
    weights = sum(layer.weight.numel() for layer in layers)
    assert weights < tensors < 1.1 * weights  # a byte each, plus scales and biases


def test_nets_that_cannot_be_traced_and_damaged_files_are_refused(
    make_mlp: Make, images: Tensor, tmp_path: Path
) -> None:
    class Sized(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.flatten().view(len(x), -1)

    path = tmp_path / "net.pt2"
    with pytest.raises(UserError, match=r"can't trace Sized for inputs of any size"):
        target.export(Sized(), images, path)
    assert not list(tmp_path.iterdir())
    target.export(make_mlp(), images, path)
    path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(UserError, match=r"can't be read as a program of target=torch_export"):
        target.load(path)


@pytest.mark.parametrize("way", ["entries of one name", "two directories"])
def test_what_torch_reads_is_what_was_looked_at(make_mlp: Make, tmp_path: Path, way: str) -> None:
    """Python's and torch's readers of archives can be made to see other entries in one file."""
    path, ran = tmp_path / "model.pt2", tmp_path / "ran"
    target.export(shipped(make_mlp()), pixels(2), path)
    evil = io.BytesIO()
    torch.save(_Touch(ran), evil)
    with zipfile.ZipFile(path) as archive:
        content = {name: archive.read(name) for name in archive.namelist()}
    name = next(name for name in content if name.endswith("data/sample_inputs/model.pt"))
    good, bad = packed(content), packed({**content, name: evil.getvalue()})
    if way == "two directories":
        path.write_bytes(behind(bad, good))
    else:
        with zipfile.ZipFile(path, "w") as archive, warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # about the duplicate name
            for entry, data in content.items():
                for copy in [evil.getvalue(), data, data] if entry == name else [data]:
                    archive.writestr(entry, copy)
    with suppress(UserError):  # a file may open if torch would read its good entries
        target.load(path, 1)
    assert not ran.exists()


class _Touch:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> object:
        return Path.touch, (self.path,)


def packed(content: dict[str, bytes]) -> bytes:
    found = io.BytesIO()
    with zipfile.ZipFile(found, "w") as archive:
        for name, data in content.items():
            archive.writestr(zipfile.ZipInfo(name), data)
    return found.getvalue()


def behind(first: bytes, second: bytes) -> bytes:
    """Return an archive whose end record leads to `first`'s directory. Python looks just before it, at `second`'s."""
    cut = []
    for archive in (first, second):
        end = archive.rindex(b"PK\5\6")
        size, offset = struct.unpack("<II", archive[end + 12 : end + 20])
        cut.append((archive[:offset], bytearray(archive[offset : offset + size]), archive[end:]))
    (files, directory, _), (others, following, end_record) = cut
    assert len(directory) == len(following)
    # Python takes bytes before the directory that it found for a prefix, and shifts every offset by their number
    moved, place = len(files) - len(others), 0
    while place < len(following):
        lengths = struct.unpack("<HHH", following[place + 28 : place + 34])
        (offset,) = struct.unpack("<I", following[place + 42 : place + 46])
        following[place + 42 : place + 46] = struct.pack("<I", offset + moved)
        place += 46 + sum(lengths)
    end_record = end_record[:12] + struct.pack("<II", len(directory), len(files)) + end_record[20:]
    return files + directory + others + following + end_record


CPU = torch.device("cpu")  # in place of a GPU


def test_answers_of_a_device_are_those_without_copies_and_of_full_float32() -> None:
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = True
    net, x = nn.Linear(3, 2), np.random.default_rng(0).normal(size=(9, 3)).astype(np.float32)
    settings = []

    def call(x: Tensor) -> Tensor:
        settings.append((torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32))
        return net(x)

    plain, placed = on_arrays(net), on_arrays(call, None, CPU)
    backwards = np.frombuffer(x.tobytes(), np.float32).reshape(x.shape)[::-1]  # read-only and not contiguous
    for given in (x, x[:0], backwards):
        np.testing.assert_array_equal(placed(given), plain(given))
    assert settings == [("highest", False)] * 3
    assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32) == ("high", True)


def test_pixels_are_normalised_to_the_bits_of_training() -> None:
    mean, std = [0.4914, 0.4822, 0.4465], [0.2470, 0.2435, 0.2616]
    x = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(2, 3, 16, 16)
    found = prepared({"preprocess": {"in_graph": False, "mean": mean, "std": std}}, x.numpy())
    assert found.dtype == np.float32
    assert np.array_equal(found, Normalizer(mean, std, 3)(x).numpy())
    ids = np.arange(6).reshape(2, 3)
    assert prepared({"preprocess": None}, ids) is ids
