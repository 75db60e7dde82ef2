"""Batched transforms of training images for `data.augment`, on the device, seeded per sample.

The operations on uint8 images [n, channels, height, width], with a level each, equal Pillow's ImageEnhance and ImageOps
on single images to the bit, on any device. Sums are of integers, and all other rounding is elementwise, so that results
do not depend on how a batch is split. docs/reference/data.md describes the arguments of the transforms.
"""

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Annotated, Literal

import pydantic
import torch
from torch import Tensor

from lathe.config.types import NonNegative, NonNegativeInt, Positive, PositiveShare, Share
from lathe.config.validation import validated
from lathe.data.augment import Transform, box_mask
from lathe.data.random import Rng
from lathe.errors import ArgumentError

TRIES = 10  # as in torchvision


def grey(images: Tensor) -> Tensor:
    """Return the luma (ITU-R 601) of colour images, int32 [n, 1, height, width]; grey ones unchanged."""
    if images.shape[1] == 1:
        return images.int()
    weights = torch.tensor([19595, 38470, 7471], dtype=torch.int32, device=images.device)
    return ((images.int() * weights[:, None, None]).sum(1, keepdim=True, dtype=torch.int32) + 0x8000) >> 16


def blend(images: Tensor, other: Tensor, factor: Tensor) -> Tensor:
    """Interpolate from `other` (`factor` [n] 0) to the image (1) and beyond, clipped to 0 and 255."""
    other = other.float()
    mixed = other + factor.float()[:, None, None, None] * (images.float() - other)
    return mixed.clamp_(0, 255).to(torch.uint8)


def brightness(images: Tensor, factor: Tensor) -> Tensor:
    """Blend with black."""
    return blend(images, torch.zeros_like(images), factor)


def contrast(images: Tensor, factor: Tensor) -> Tensor:
    """Blend with the image's mean grey."""
    pixels = images.shape[-2] * images.shape[-1]
    total = grey(images).sum((1, 2, 3), dtype=torch.int64)
    return blend(images, ((2 * total + pixels) // (2 * pixels))[:, None, None, None], factor)


def saturation(images: Tensor, factor: Tensor) -> Tensor:
    """Blend with the grey image."""
    return blend(images, grey(images), factor)


def sharpness(images: Tensor, factor: Tensor) -> Tensor:
    """Blend with the image smoothed by ((1, 1, 1), (1, 5, 1), (1, 1, 1)) / 13, except its border."""
    height, width = images.shape[-2:]
    if min(height, width) < 3:
        return images
    whole = images.int()
    total = 4 * whole[..., 1:-1, 1:-1]
    for y in range(3):
        for x in range(3):
            total = total + whole[..., y : y + height - 2, x : x + width - 2]
    smooth = whole.clone()
    smooth[..., 1:-1, 1:-1] = (2 * total + 13) // 26
    return blend(images, smooth, factor)


def hue(images: Tensor, shift: Tensor) -> Tensor:
    """Rotate the hue of colour images by `shift` [n] of a full circle; keeps saturation and value (HSV)."""
    red, green, blue = (images.float() / 255).unbind(1)
    value = torch.maximum(torch.maximum(red, green), blue)
    chroma = value - torch.minimum(torch.minimum(red, green), blue)
    per = torch.where(chroma > 0, chroma, 1)
    sector = torch.where(
        value == red, (green - blue) / per, torch.where(value == green, 2 + (blue - red) / per, 4 + (red - green) / per)
    )
    turned = sector + 6 * shift.float()[:, None, None]
    channels = []
    for offset in (5, 3, 1):
        position = torch.remainder(offset + turned, 6)
        channels.append(value - chroma * torch.minimum(position, 4 - position).clamp(0, 1))
    return (torch.stack(channels, 1) * 255 + 0.5).clamp_(0, 255).to(torch.uint8)


def posterize(images: Tensor, bits: Tensor) -> Tensor:
    """Keep the highest `bits` [n] of each pixel."""
    mask = 256 - 2 ** (8 - bits.long())
    return images & mask.to(torch.uint8)[:, None, None, None]


def solarize(images: Tensor, threshold: Tensor) -> Tensor:
    """Invert pixels of at least `threshold` [n]."""
    return torch.where(images >= threshold.float()[:, None, None, None], 255 - images, images)


def autocontrast(images: Tensor, _: Tensor) -> Tensor:
    """Stretch each channel from its least and greatest value to 0 and 255."""
    flat = images.flatten(2)
    low, high = flat.amin(2).double(), flat.amax(2).double()
    span = torch.where(high > low, high - low, 1)
    scale = torch.full_like(span, 255) / span  # a number over a tensor would be rounded twice
    stretched = (flat * scale[..., None] + (-low * scale)[..., None]).clamp_(0, 255).to(torch.uint8)
    return torch.where((high > low)[..., None], stretched, flat).view_as(images)


def equalize(images: Tensor, _: Tensor) -> Tensor:
    """Equalize the histogram of each channel."""
    flat = images.flatten(2).long()
    counts = torch.zeros(*flat.shape[:2], 256, dtype=torch.int64, device=images.device)
    counts.scatter_add_(2, flat, torch.ones_like(flat))
    last = counts.gather(2, flat.amax(2, keepdim=True))  # of the greatest value
    step = (flat.shape[2] - last) // 255
    table = (counts.cumsum(2) - counts + step // 2) // step.clamp(min=1)
    return torch.where(step > 0, table.clamp(max=255).gather(2, flat), flat).to(torch.uint8).view_as(images)


def warp(images: Tensor, matrix: Tensor) -> Tensor:
    """Move pixel (a x + b y + c, d x + e y + f) to (x, y): nearest neighbour, black outside.

    Coordinates are pixels from the upper left corner to a pixel's middle. `matrix` has a to f, float64 [n, 6].
    """
    height, width = images.shape[-2:]
    a, b, c, d, e, f = matrix[:, :, None, None].unbind(1)
    y = torch.arange(height, dtype=torch.float64, device=images.device)[:, None] + 0.5
    x = torch.arange(width, dtype=torch.float64, device=images.device) + 0.5
    column, row = (a * x + b * y + c).floor(), (d * x + e * y + f).floor()
    inside = (column >= 0) & (column < width) & (row >= 0) & (row < height)
    index = torch.where(inside, row * width + column, 0).long().flatten(1)[:, None].expand(-1, images.shape[1], -1)
    return images.flatten(2).gather(2, index).view_as(images) * inside[:, None]


def _matrix(level: Tensor, **changes: Tensor) -> Tensor:
    ones, zeros = torch.ones_like(level), torch.zeros_like(level)
    identity = {"a": ones, "b": zeros, "c": zeros, "d": zeros, "e": ones, "f": zeros}
    return torch.stack(list((identity | changes).values()), 1)


def shear_x(images: Tensor, level: Tensor) -> Tensor:
    """Shift rows to the left, by `level` [n] times their distance from the top."""
    return warp(images, _matrix(level, b=level))


def shear_y(images: Tensor, level: Tensor) -> Tensor:
    """Shift columns up, by `level` [n] times their distance from the left."""
    return warp(images, _matrix(level, d=level))


def translate_x(images: Tensor, pixels: Tensor) -> Tensor:
    """Shift to the right, by whole pixels."""
    return warp(images, _matrix(pixels, c=-pixels.trunc()))


def translate_y(images: Tensor, pixels: Tensor) -> Tensor:
    """Shift down, by whole pixels."""
    return warp(images, _matrix(pixels, f=-pixels.trunc()))


def rotate(images: Tensor, degrees: Tensor) -> Tensor:
    """Rotate counter-clockwise about the centre."""
    y, x = (side / 2 for side in images.shape[-2:])
    cos, sin = torch.cos(degrees * (math.pi / 180)), torch.sin(degrees * (math.pi / 180))
    return warp(images, _matrix(cos, a=cos, b=-sin, c=x - cos * x + sin * y, d=sin, e=cos, f=y - sin * x - cos * y))


def random_boxes(
    rng: Rng, scale: Sequence[float], ratio: Sequence[float], height: int, width: int
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
    first_fit = fits.int().argmax(1, keepdim=True)  # the first of the largest
    wide, tall = wide.gather(1, first_fit)[:, 0], tall.gather(1, first_fit)[:, 0]
    corner = rng.uniform(2)
    top = _place(corner[:, 0], (height - tall).clamp(min=0))
    left = _place(corner[:, 1], (width - wide).clamp(min=0))
    return torch.stack((top, top + tall, left, left + wide), dim=1), fits.any(1)


def _place(uniforms: Tensor, last: Tensor) -> Tensor:
    """Return 0..last with equal probability."""
    return torch.minimum((uniforms * (last + 1)).long(), last)


class RandomResizedCrop(Transform, is_tested=True):
    """Enlarges a random box, bilinearly, to the size of the image (Szegedy et al. 2015, arXiv:1409.4842).

    Ratio, tries and the fallback are those of torchvision.
    """

    @validated
    def __init__(
        self,
        scale: Annotated[Sequence[PositiveShare], pydantic.Field(min_length=2, max_length=2)] = (0.08, 1.0),
        ratio: Annotated[Sequence[Positive], pydantic.Field(min_length=2, max_length=2)] = (3 / 4, 4 / 3),
    ) -> None:
        self.scale, self.ratio = tuple(scale), tuple(ratio)

    def __call__(self, images: Tensor, rng: Rng) -> Tensor:
        height, width = images.shape[-2:]
        box, fits = random_boxes(rng, self.scale, self.ratio, height, width)
        # otherwise the largest central box with an allowed ratio
        low, high = self.ratio
        tall = round(width / low) if width / height < low else height
        wide = round(height * high) if width / height > high else width
        top, left = (height - tall) // 2, (width - wide) // 2
        middle = box.new_tensor((top, top + tall, left, left + wide))
        return resized(images, torch.where(fits[:, None], box, middle))


def resized(images: Tensor, box: Tensor) -> Tensor:
    """Enlarge each image's `box` (int64 [n, 4]: top, bottom, left, right) to the image's size, bilinearly."""
    height, width = images.shape[-2:]
    top, bottom, left, right = box.unbind(1)
    rows = _between(images, 2, *_places(top, bottom, height))
    enlarged = _between(rows, 3, *_places(left, right, width))
    return enlarged if images.is_floating_point() else (enlarged + 0.5).floor_().clamp_(0, 255).to(images.dtype)


def _places(first: Tensor, end: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the two pixels around each of `count` places, int64 [n, count], and the weight of the second."""
    size = (end - first).double()[:, None]
    position = (torch.arange(count, device=first.device) + 0.5) * (size / count) - 0.5
    position = torch.minimum(position.clamp(min=0), size - 1)
    low = position.floor()
    high = torch.minimum(low + 1, size - 1)
    return first[:, None] + low.long(), first[:, None] + high.long(), (position - low).float()


def _between(images: Tensor, dim: int, low: Tensor, high: Tensor, share: Tensor) -> Tensor:
    shape = [len(images), 1, 1, 1]
    shape[dim] = images.shape[dim]
    first, second = (torch.take_along_dim(images, index.view(shape), dim).float() for index in (low, high))
    return first + share.view(shape) * (second - first)


class RandomErasing(Transform, is_tested=True):
    """Covers a box of random size, ratio and place (Zhong et al. 2017, arXiv:1708.04896)."""

    @validated
    def __init__(
        self,
        p: Share = 0.5,
        scale: Annotated[Sequence[PositiveShare], pydantic.Field(min_length=2, max_length=2)] = (0.02, 0.33),
        ratio: Annotated[Sequence[Positive], pydantic.Field(min_length=2, max_length=2)] = (0.3, 3.3),
        fill: Literal["mean", "zero", "random"] = "mean",
    ) -> None:
        self.p, self.fill = p, fill
        self.scale, self.ratio = tuple(scale), tuple(ratio)

    def __call__(self, images: Tensor, rng: Rng) -> Tensor:
        height, width = images.shape[-2:]
        selected = rng.uniform() < self.p
        box, fits = random_boxes(rng, self.scale, self.ratio, height, width)
        mask = box_mask(box, height, width) & (selected & fits)[:, None, None, None]
        if self.fill == "random":
            return torch.where(mask, rng.integers(256, *images.shape[1:]).to(images.dtype), images)
        colour = rng.fill if self.fill == "mean" and rng.fill is not None else images.new_zeros(images.shape[1])
        return torch.where(mask, colour.to(images.dtype)[:, None, None], images)


JITTERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "brightness": brightness,
    "contrast": contrast,
    "saturation": saturation,
    "hue": hue,
}


class ColorJitter(Transform, is_tested=True):
    """Changes brightness, contrast, saturation and hue, in random order per sample (as torchvision's)."""

    uint8_only = True

    @validated
    def __init__(
        self,
        brightness: NonNegative = 0.0,
        contrast: NonNegative = 0.0,
        saturation: NonNegative = 0.0,
        hue: Annotated[float, pydantic.Field(ge=0, le=0.5)] = 0.0,
    ) -> None:
        self.widths = {"brightness": brightness, "contrast": contrast, "saturation": saturation, "hue": hue}
        if not any(self.widths.values()):
            raise ArgumentError("brightness=0, and contrast, saturation and hue as well: give one of them.")

    def check(self, channels: int, height: int, width: int) -> None:
        coloured = [name for name in ("saturation", "hue") if self.widths[name]]
        if channels != 3 and coloured:
            raise ArgumentError(f"{coloured[0]} changes RGB images alone, and data.channels={channels}: leave it out.")
        if channels not in (1, 3) and self.widths["contrast"]:
            raise ArgumentError(f"contrast takes grey or RGB images, and data.channels={channels}: leave it out.")

    def __call__(self, images: Tensor, rng: Rng) -> Tensor:
        u, order = rng.uniform(4), rng.uniform(4).argsort(dim=1, stable=True)
        images = images.clone()
        for position in range(4):
            for number, (name, operation) in enumerate(JITTERS.items()):
                rows = (order[:, position] == number).nonzero()[:, 0]
                width = self.widths[name]
                if width and len(rows):
                    low, high = (-width, width) if name == "hue" else (max(0.0, 1 - width), 1 + width)
                    images[rows] = operation(images[rows], low + (high - low) * u[rows, number])
        return images


Op = Callable[[Tensor, Tensor], Tensor]
Levels = tuple[float, float] | None  # at the first and the last bin; None for an operation without levels
OPS: dict[str, tuple[Op, bool]] = {  # and whether the level has a random sign
    "identity": (lambda images, _: images, False),
    "shear_x": (shear_x, True),
    "shear_y": (shear_y, True),
    "translate_x": (translate_x, True),
    "translate_y": (translate_y, True),
    "rotate": (rotate, True),
    "brightness": (lambda images, level: brightness(images, 1 + level), True),
    "color": (lambda images, level: saturation(images, 1 + level), True),
    "contrast": (lambda images, level: contrast(images, 1 + level), True),
    "sharpness": (lambda images, level: sharpness(images, 1 + level), True),
    "posterize": (lambda images, level: posterize(images, level.round()), False),
    "solarize": (solarize, False),
    "auto_contrast": (autocontrast, False),
    "equalize": (equalize, False),
}


def _levels(shear: float, right: float, down: float, degrees: float, blend: float, bits: int) -> dict[str, Levels]:
    """Return the levels of the operations at the first and the last bin."""
    ends = {"shear_x": shear, "shear_y": shear, "translate_x": right, "translate_y": down, "rotate": degrees}
    ends |= dict.fromkeys(("brightness", "color", "contrast", "sharpness"), blend)
    return {**{name: (0, end) for name, end in ends.items()}, "posterize": (8, bits), "solarize": (255, 0)}


class Policy(Transform):
    """Draws operations of `OPS` for each sample."""

    uint8_only = True
    bins: int

    @abstractmethod
    def levels(self, height: int, width: int) -> dict[str, Levels]:
        """Return the levels of the operations that have some."""

    def check(self, channels: int, height: int, width: int) -> None:
        if channels not in (1, 3):
            raise ArgumentError(f"channels={channels}: {type(self).__name__} takes grey or RGB images, 1 or 3.")

    def apply(self, images: Tensor, operations: Tensor, places: Tensor, coin: Tensor) -> Tensor:
        """Apply `operations` [n] at the levels of bins `places` [n], negated by `coin` [n] if signed."""
        images, levels = images.clone(), self.levels(*images.shape[-2:])
        for number, (name, (operation, signed)) in enumerate(OPS.items()):
            rows = (operations == number).nonzero()[:, 0]
            if name == "identity" or not len(rows):
                continue
            first, last = levels.get(name) or (0.0, 0.0)
            table = torch.linspace(first, last, self.bins, dtype=torch.float64, device=images.device)
            level = table[places[rows]]
            level = torch.where(coin[rows], -level, level) if signed else level
            images[rows] = operation(images[rows], level)
        return images


class RandAugment(Policy, is_tested=True):
    """Applies `num_ops` operations at one magnitude (Cubuk et al. 2020, arXiv:1909.13719).

    Operations and levels are torchvision's, with nearest-neighbour pixels, black outside.
    """

    @validated
    def __init__(
        self,
        num_ops: Annotated[int, pydantic.Field(ge=1, le=64)] = 2,
        magnitude: NonNegativeInt = 9,
        num_bins: Annotated[int, pydantic.Field(ge=2)] = 31,
    ) -> None:
        self.num_ops, self.magnitude, self.bins = num_ops, magnitude, num_bins
        if magnitude >= num_bins:
            raise ArgumentError(f"magnitude={magnitude} is no bin of num_bins={num_bins}: choose 0 to {num_bins - 1}.")

    def levels(self, height: int, width: int) -> dict[str, Levels]:
        return _levels(0.3, 150 / 331 * width, 150 / 331 * height, 30, 0.9, 4)

    def __call__(self, images: Tensor, rng: Rng) -> Tensor:
        operations, coins = rng.integers(len(OPS), self.num_ops), rng.uniform(self.num_ops) < 0.5
        bins = torch.full_like(operations[:, 0], self.magnitude)
        for number in range(self.num_ops):
            images = self.apply(images, operations[:, number], bins, coins[:, number])
        return images


class TrivialAugmentWide(Policy, is_tested=True):
    """Applies one operation per sample at a random level (Müller and Hutter 2021, arXiv:2103.10158).

    Pixels are those of the nearest neighbour, black outside.
    """

    @validated
    def __init__(self, num_bins: Annotated[int, pydantic.Field(ge=2)] = 31) -> None:
        self.bins = num_bins

    def levels(self, height: int, width: int) -> dict[str, Levels]:
        return _levels(0.99, 32, 32, 135, 0.99, 2)

    def __call__(self, images: Tensor, rng: Rng) -> Tensor:
        return self.apply(images, rng.integers(len(OPS)), rng.integers(self.bins), rng.uniform() < 0.5)
