"""Batched transforms of training images for `data.augment`, on the device, seeded per sample."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import pydantic
import torch
from torch import Tensor

from lathe.config.types import Count, NonNegative, NonNegativeInt, Positive, PositiveShare, Share
from lathe.config.validation import validated
from lathe.data import image_ops as ops
from lathe.data.augment import Augment, box_mask
from lathe.data.random import Rng
from lathe.errors import ArgumentError

TRIES = 10  # as in torchvision


class Transform(ABC):
    """A transform of a batch of training images; any function `(images, rng) -> images` works too.

    `images` are [n, channels, height, width] from 0 to 255: uint8, or float32 after a function that returns it. The
    result has the same shape and dtype, or is float32. Random numbers must come from `rng`, and an image's result must
    not depend on the others in the batch, so that neither devices nor interruptions change it.
    """

    uint8_only = False  # True if it does not take float32
    is_tested = False  # for Lathe's transforms: tests replace the check at the start of a run

    @abstractmethod
    def __call__(self, images: Tensor, rng: Rng) -> Tensor:
        """Return the transformed images."""

    def check(self, channels: int, height: int, width: int) -> None:  # noqa: B027 (most take all images)
        """Raise ArgumentError if it can't be used on images of this shape."""


class Field:
    """A transform that the loaders have built in; its arguments become fields of `Augment`."""

    mixes = False
    names: ClassVar[tuple[tuple[str, str], ...]]  # own arguments, and the fields of `Augment` that they become

    def fields(self) -> dict[str, Any]:
        """Return the equivalent fields of `Augment`."""
        return {field: getattr(self, name) for name, field in self.names}

    def check(self, channels: int, height: int, width: int) -> None:
        """Raise ArgumentError if it can't be used on images of this shape."""


@validated
@dataclass(frozen=True)
class RandomCrop(Field):
    """Pads each image and cuts a window of the original size out of it.

    Args:
        padding: pixels on each side.
        fill: padding with black pixels, or with the mirrored image.
    """

    names = (("padding", "crop"), ("fill", "crop_fill"))
    padding: Count
    fill: Literal["zero", "reflect"] = "zero"

    def check(self, channels: int, height: int, width: int) -> None:
        if self.padding >= min(height, width):
            raise ArgumentError(
                f"padding={self.padding} is too much for images of {height} x {width} pixels: choose less than a side."
            )


@validated
@dataclass(frozen=True)
class RandomFlip(Field):
    """Flips images left to right.

    Args:
        how: "random" draws for each sample and epoch; "alternating" is as in `Augment`.
    """

    names = (("how", "flip"),)
    how: Literal["random", "alternating"] = "random"


@validated
@dataclass(frozen=True)
class Cutout(Field):
    """Sets a random square, clipped at the border, to the mean colour (DeVries et al., arXiv:1708.04552).

    Args:
        size: side in pixels.
    """

    names = (("size", "cutout"),)
    size: Count

    def check(self, channels: int, height: int, width: int) -> None:
        if self.size > min(height, width):
            raise ArgumentError(
                f"size={self.size} is a square larger than images of {height} x {width} pixels: choose a side of "
                f"{min(height, width)} at most."
            )


@validated
@dataclass(frozen=True)
class Mixup(Field):
    """Weighted sums of two images and of their labels (Zhang et al., arXiv:1710.09412); comes last.

    Args:
        alpha: of the Beta(alpha, alpha) of each sample's weight.
    """

    names = (("alpha", "mixup"),)
    mixes = True
    alpha: Positive


@validated
@dataclass(frozen=True)
class CutMix(Field):
    """Pastes a box of another image (Yun et al., arXiv:1905.04899); comes last.

    With `Mixup` too, each sample takes either with probability one half.

    Args:
        alpha: of the Beta(alpha, alpha) of the share outside the box.
    """

    names = (("alpha", "cutmix"),)
    mixes = True
    alpha: Positive


def items_of(augment: Augment) -> dict[str, Field]:
    """Return the transforms that the fields of `augment` switch on, by the field, in their order."""
    items: dict[str, Field] = {"crop": RandomCrop(augment.crop, augment.crop_fill)} if augment.crop else {}
    if augment.flip != "none":
        items["flip"] = RandomFlip(augment.flip)
    kinds: dict[str, Callable[[Any], Field]] = {"cutout": Cutout, "mixup": Mixup, "cutmix": CutMix}
    return items | {name: kind(value) for name, kind in kinds.items() if (value := getattr(augment, name))}


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
    chosen = fits.int().argmax(1, keepdim=True)  # the first of the largest
    wide, tall = wide.gather(1, chosen)[:, 0], tall.gather(1, chosen)[:, 0]
    place = rng.uniform(2)
    top = _place(place[:, 0], (height - tall).clamp(min=0))
    left = _place(place[:, 1], (width - wide).clamp(min=0))
    return torch.stack((top, top + tall, left, left + wide), dim=1), fits.any(1)


def _place(uniforms: Tensor, last: Tensor) -> Tensor:
    """Return 0..last with equal probability."""
    return torch.minimum((uniforms * (last + 1)).long(), last)


class RandomResizedCrop(Transform):
    """Enlarges a random box, bilinearly, to the size of the image (Szegedy et al. 2015, arXiv:1409.4842).

    Ratio, tries and the fallback are those of torchvision.

    Args:
        scale: least and greatest share of the image's area.
        ratio: least and greatest ratio of width to height.
    """

    is_tested = True

    @validated
    def __init__(
        self,
        scale: Annotated[Sequence[PositiveShare], pydantic.Field(min_length=2, max_length=2)] = (0.08, 1.0),
        ratio: Annotated[Sequence[Positive], pydantic.Field(min_length=2, max_length=2)] = (3 / 4, 4 / 3),
    ) -> None:
        self.scale, self.ratio = tuple(scale), tuple(ratio)

    def __call__(self, images: Tensor, rng: Rng) -> Tensor:
        height, width = images.shape[-2:]
        box, found = random_boxes(rng, self.scale, self.ratio, height, width)
        return resized(images, torch.where(found[:, None], box, box.new_tensor(self.middle(height, width))))

    def middle(self, height: int, width: int) -> tuple[int, int, int, int]:
        """Return the largest central box with an allowed ratio."""
        low, high = self.ratio
        tall, wide = height, width
        if width / height < low:
            tall = round(width / low)
        elif width / height > high:
            wide = round(height * high)
        top, left = (height - tall) // 2, (width - wide) // 2
        return top, top + tall, left, left + wide


def resized(images: Tensor, box: Tensor) -> Tensor:
    """Enlarge each image's `box` (int64 [n, 4]: top, bottom, left, right) to the image's size, bilinearly."""
    height, width = images.shape[-2:]
    top, bottom, left, right = box.unbind(1)
    rows = _between(images, 2, *_places(top, bottom, height))
    found = _between(rows, 3, *_places(left, right, width))
    return found if images.is_floating_point() else (found + 0.5).floor_().clamp_(0, 255).to(images.dtype)


def _places(first: Tensor, end: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the two pixels around each of `count` places, int64 [n, count], and the weight of the second."""
    size = (end - first).double()[:, None]
    at = (torch.arange(count, device=first.device) + 0.5) * (size / count) - 0.5
    at = torch.minimum(at.clamp(min=0), size - 1)
    low = at.floor()
    high = torch.minimum(low + 1, size - 1)
    return first[:, None] + low.long(), first[:, None] + high.long(), (at - low).float()


def _between(images: Tensor, dim: int, low: Tensor, high: Tensor, share: Tensor) -> Tensor:
    shape = [len(images), 1, 1, 1]
    shape[dim] = images.shape[dim]
    one, other = (torch.take_along_dim(images, place.view(shape), dim).float() for place in (low, high))
    return one + share.view(shape) * (other - one)


class RandomErasing(Transform):
    """Covers a box of random size, ratio and place (Zhong et al. 2017, arXiv:1708.04896).

    Args:
        p: probability that a sample is covered in an epoch.
        scale: least and greatest share of the image's area.
        ratio: least and greatest ratio of width to height.
        fill: the mean colour, black, or a random value for each pixel and channel.
    """

    is_tested = True

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
        taken = rng.uniform() < self.p
        box, found = random_boxes(rng, self.scale, self.ratio, height, width)
        mask = box_mask(box, height, width) & (taken & found)[:, None, None, None]
        if self.fill == "random":
            return torch.where(mask, rng.integers(256, *images.shape[1:]).to(images.dtype), images)
        colour = rng.fill if self.fill == "mean" and rng.fill is not None else images.new_zeros(images.shape[1])
        return torch.where(mask, colour.to(images.dtype)[:, None, None], images)


JITTERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "brightness": ops.brightness,
    "contrast": ops.contrast,
    "saturation": ops.saturation,
    "hue": ops.hue,
}


class ColorJitter(Transform):
    """Changes brightness, contrast, saturation and hue, in random order per sample (as torchvision's).

    Args:
        brightness: the factor is uniform from 1 - brightness, at least 0, to 1 + brightness; 0 is off.
        contrast: as for brightness.
        saturation: as for brightness; for RGB images.
        hue: the shift is uniform from -hue to hue of a full circle; 0 is off; for RGB images.
    """

    uint8_only = True
    is_tested = True

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
        for place in range(4):
            for number, (name, operation) in enumerate(JITTERS.items()):
                rows = (order[:, place] == number).nonzero()[:, 0]
                if self.widths[name] and len(rows):
                    images[rows] = operation(images[rows], self.level(name, u[rows, number]))
        return images

    def level(self, name: str, u: Tensor) -> Tensor:
        """Return the factor or shift for a number in [0, 1)."""
        width = self.widths[name]
        low, high = (-width, width) if name == "hue" else (max(0.0, 1 - width), 1 + width)
        return low + (high - low) * u


Op = Callable[[Tensor, Tensor], Tensor]
Levels = tuple[float, float] | None  # at the first and the last bin; None for an operation without levels
OPS: dict[str, tuple[Op, bool]] = {  # and whether the level has a random sign
    "identity": (lambda images, _: images, False),
    "shear_x": (ops.shear_x, True),
    "shear_y": (ops.shear_y, True),
    "translate_x": (ops.translate_x, True),
    "translate_y": (ops.translate_y, True),
    "rotate": (ops.rotate, True),
    "brightness": (lambda images, level: ops.brightness(images, 1 + level), True),
    "color": (lambda images, level: ops.saturation(images, 1 + level), True),
    "contrast": (lambda images, level: ops.contrast(images, 1 + level), True),
    "sharpness": (lambda images, level: ops.sharpness(images, 1 + level), True),
    "posterize": (lambda images, level: ops.posterize(images, level.round()), False),
    "solarize": (ops.solarize, False),
    "auto_contrast": (ops.autocontrast, False),
    "equalize": (ops.equalize, False),
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

    def apply(self, images: Tensor, chosen: Tensor, places: Tensor, coin: Tensor) -> Tensor:
        """Apply operations `chosen` [n] at the levels of bins `places` [n], negated by `coin` [n] if signed."""
        images, levels = images.clone(), self.levels(*images.shape[-2:])
        for number, (name, (operation, signed)) in enumerate(OPS.items()):
            rows = (chosen == number).nonzero()[:, 0]
            if name == "identity" or not len(rows):
                continue
            first, last = levels.get(name) or (0.0, 0.0)
            table = torch.linspace(first, last, self.bins, dtype=torch.float64, device=images.device)
            level = table[places[rows]]
            level = torch.where(coin[rows], -level, level) if signed else level
            images[rows] = operation(images[rows], level)
        return images


class RandAugment(Policy):
    """Applies `num_ops` operations at one magnitude (Cubuk et al. 2020, arXiv:1909.13719).

    Operations and levels are torchvision's, with nearest-neighbour pixels, black outside.

    Args:
        num_ops: operations for each sample.
        magnitude: bin of their levels, from 0.
        num_bins: bins of the levels.
    """

    is_tested = True

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
        chosen, coins = rng.integers(len(OPS), self.num_ops), rng.uniform(self.num_ops) < 0.5
        place = torch.full_like(chosen[:, 0], self.magnitude)
        for number in range(self.num_ops):
            images = self.apply(images, chosen[:, number], place, coins[:, number])
        return images


class TrivialAugmentWide(Policy):
    """Applies one operation per sample at a random level (Müller and Hutter 2021, arXiv:2103.10158).

    Pixels are those of the nearest neighbour, black outside.

    Args:
        num_bins: bins of the levels.
    """

    is_tested = True

    @validated
    def __init__(self, num_bins: Annotated[int, pydantic.Field(ge=2)] = 31) -> None:
        self.bins = num_bins

    def levels(self, height: int, width: int) -> dict[str, Levels]:
        return _levels(0.99, 32, 32, 135, 0.99, 2)

    def __call__(self, images: Tensor, rng: Rng) -> Tensor:
        return self.apply(images, rng.integers(len(OPS)), rng.integers(self.bins), rng.uniform() < 0.5)
