"""Preprocessing of pixels in the graph."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate

from lathe import export
from lathe.data import Normalizer
from lathe.errors import UserError
from lathe.export.inputs import Preprocess, Shipped, check_input_size

MEAN, STD = [0.5071, 0.4865, 0.4409], [0.2673, 0.2564, 0.2762]
# with a centre square on whole pixels
SIZES = [(1, 1), (1, 41), (8, 12), (33, 11), (224, 32), (17, 17)]


def pixels(*shape: int) -> Tensor:
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.uint8)


def make(input_size: Any = None) -> Preprocess:
    return Preprocess(MEAN, STD, (16, 16), input_size)


def resized(x: Tensor) -> Tensor:
    """Return the reference: torch's antialiased filter on whole pixels of the largest square."""
    side, (height, width) = min(x.shape[2:]), x.shape[2:]
    top, left = (height - side) // 2, (width - side) // 2
    # the filter is wider than a pixel: outside the square it sees the picture, not an edge
    whole = interpolate(x.float(), size=(height * 16 // side, width * 16 // side), mode="bilinear", antialias=True)
    return Normalizer(MEAN, STD, 3)(whole[:, :, top * 16 // side :, left * 16 // side :][:, :, :16, :16])


def test_without_resizing_it_is_normalisation_to_the_bit() -> None:
    every = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(1, 3, 16, 16)
    for x in (every, pixels(5, 3, 16, 16)):
        assert torch.equal(make()(x), Normalizer(MEAN, STD, 3)(x))
        assert torch.equal(make([16, 16])(x), Normalizer(MEAN, STD, 3)(x))
        assert torch.equal(make("any")(x), Normalizer(MEAN, STD, 3)(x))


@pytest.mark.parametrize("size", SIZES)
def test_resizing_is_torchs_antialiased_filter(size: tuple[int, int]) -> None:
    x = pixels(3, 3, *size)
    for found in (make("any")(x), make(size)(x)):
        assert found.shape == (3, 3, 16, 16)
        torch.testing.assert_close(found, resized(x), rtol=0, atol=1e-5)


@pytest.fixture
def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3, stride=3), nn.Flatten(), nn.Linear(100, 5)).eval().requires_grad_(False)


@pytest.mark.parametrize(("input_size", "sizes"), [("any", [(16, 16), (1, 41), (33, 11)]), ([40, 32], [(40, 32)])])
def test_pictures_of_other_sizes_in_a_file(net: nn.Module, tmp_path: Path, input_size: Any, sizes: Any) -> None:
    shipped, onnx = Shipped(net, make(input_size)), export.get("onnx")
    sides = (16, 16) if input_size == "any" else input_size
    onnx.export(shipped, torch.zeros(2, 3, *sides, dtype=torch.uint8), tmp_path / "net.onnx")
    run = onnx.load(tmp_path / "net.onnx", 1)
    for batch, size in enumerate(sizes, 1):
        x = pixels(batch, 3, *size)
        torch.testing.assert_close(torch.from_numpy(run(x.numpy())), net(resized(x)), rtol=0, atol=1e-5)


def test_input_sizes() -> None:
    given = {"any": "any", None: (8, 9), (4, 5): (4, 5), 32: (32, 32)}
    assert {size: check_input_size(size, (8, 9)) for size in given} == given
    for wrong in ([0, 3], "all", [4097, 8]):
        with pytest.raises(UserError, match=r"^target\.input_size="):
            check_input_size(wrong, (8, 8))
