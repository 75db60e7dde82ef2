"""Boxes of a random area and aspect ratio, one for each sample."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lathe.data.random import Rng
from lathe.errors import ArgumentError

TRIES = 10  # as in torchvision


def check_range(name: str, values: Sequence[float]) -> tuple[float, float]:
    """Return the two ends of a range; raise ArgumentError if the first is above the second."""
    low, high = (float(value) for value in values)
    if low > high:
        raise ArgumentError(f"{name}={list(values)}: expected the smaller number first, got the larger one.")
    return low, high


def check_fits(scale: tuple[float, float], ratio: tuple[float, float], height: int, width: int) -> None:
    """Raise ArgumentError if no box of the smallest area and an allowed ratio fits into the image."""
    share = scale[0]
    if ratio[0] > width / (share * height) or ratio[1] < share * width / height:
        raise ArgumentError(
            f"scale={list(scale)} and ratio={list(ratio)} describe boxes larger than images of {height} x {width} "
            "pixels: choose a smaller scale, or a ratio nearer to 1."
        )


def random_boxes(
    rng: Rng, scale: tuple[float, float], ratio: tuple[float, float], height: int, width: int
) -> tuple[Tensor, Tensor]:
    """Return a box per sample, int64 [n, 4] (top, bottom, left, right), and whether it fits, bool [n].

    Areas are uniform in `scale` (a share of the image), ratios of width to height log-uniform in `ratio`; the first of
    ten tries that fits is taken.
    """
    u = rng.uniform(TRIES, 2).double()
    area = (scale[0] + (scale[1] - scale[0]) * u[..., 0]) * (height * width)
    first, last = math.log(ratio[0]), math.log(ratio[1])
    aspect = (first + (last - first) * u[..., 1]).exp()
    wide, tall = (area * aspect).sqrt().round().long(), (area / aspect).sqrt().round().long()
    fits = (wide >= 1) & (wide <= width) & (tall >= 1) & (tall <= height)
    chosen = fits.int().argmax(1, keepdim=True)  # the first of the largest
    wide, tall = wide.gather(1, chosen)[:, 0], tall.gather(1, chosen)[:, 0]
    place = rng.uniform(2)
    top = _place(place[:, 0], (height - tall).clamp(min=0))
    left = _place(place[:, 1], (width - wide).clamp(min=0))
    return torch.stack((top, top + tall, left, left + wide), dim=1), fits.any(1)


def _place(uniforms: Tensor, last: Tensor) -> Tensor:
    """Return 0..last with equal probability."""
    return torch.minimum((uniforms * (last + 1)).long(), last)
