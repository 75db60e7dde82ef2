"""Batched augmentation (its settings, its random decisions, pure functions that apply them) and normalization."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Literal

import torch
from torch import Tensor

from lathe.config.types import NonNegative, NonNegativeInt
from lathe.config.validation import validated
from lathe.data.random import sample_betas, sample_uniforms, to_integers
from lathe.errors import require

# Columns of the table of uniforms. Each method reads its own, so that switching one on does not change the others.
CROP_Y, CROP_X, FLIP, CUTOUT_Y, CUTOUT_X, MIX_CHOICE, MIX_Y, MIX_X, COLUMNS = range(9)


@validated
@dataclass(frozen=True)
class Augment:
    """Augmentation of training images, in this order: crop, flip, cutout, normalization, mixup or cutmix.

    Args:
        crop: pixels of padding on each side, from which a window of the original size is cut; 0 is off.
        crop_fill: padding with black pixels, or with the mirrored image.
        flip: left-right. "random" draws for each sample and epoch; "alternating" draws for each sample in epoch 0 and
            then flips at every epoch, so that two consecutive epochs show both sides (K. Jordan, arXiv:2404.00498).
        cutout: side in pixels of a square at a random centre, clipped at the border, that is set to the mean colour; 0
            is off (DeVries and Taylor, arXiv:1708.04552).
        mixup: alpha of the Beta(alpha, alpha) of each sample's weight; 0 is off (Zhang et al., arXiv:1710.09412).
        cutmix: the same for a box pasted from the partner (Yun et al., arXiv:1905.04899). With both on, each sample
            takes either with probability one half.
    """

    crop: NonNegativeInt = 0
    crop_fill: Literal["zero", "reflect"] = "zero"
    flip: Literal["none", "random", "alternating"] = "none"
    cutout: NonNegativeInt = 0
    mixup: NonNegative = 0.0
    cutmix: NonNegative = 0.0

    @property
    def mixes(self) -> bool:
        """Return whether samples are mixed, so that targets are class probabilities."""
        return self.mixup > 0 or self.cutmix > 0


@dataclass(frozen=True)
class Draws:
    """The random decisions for n samples in one epoch; None for a method that is off.

    Boxes are (top, bottom, left, right) in pixels, bottom and right exclusive.
    """

    top: Tensor | None = None  # int64 [n]: the crop's corner in the padded image
    left: Tensor | None = None
    flip: Tensor | None = None  # bool [n]
    cutout: Tensor | None = None  # int64 [n, 4]
    share: Tensor | None = None  # float32 [n]: mixup's weight of a sample's own pixels, 1 if cutmix is chosen
    paste: Tensor | None = None  # int64 [n, 4]: cutmix's box, empty if mixup is chosen

    def __getitem__(self, index: Tensor | slice) -> "Draws":
        return self._each(lambda decisions: decisions[index])

    def to(self, device: torch.device) -> "Draws":
        """Return the same decisions on another device."""
        return self._each(lambda decisions: decisions.to(device))

    def _each(self, call: Callable[[Tensor], Tensor]) -> "Draws":
        return Draws(*(None if (one := getattr(self, f.name)) is None else call(one) for f in fields(self)))


def draw(augment: Augment, seed: int, epoch: int, n: int, height: int, width: int) -> Draws:
    """Draw the decisions of an epoch for samples 0..n-1 on the CPU, by (seed, epoch, sample) only."""
    u = sample_uniforms(seed, epoch, n, COLUMNS)
    found: dict[str, Tensor] = {}
    if augment.crop:
        found["top"] = to_integers(u[:, CROP_Y], 2 * augment.crop + 1)
        found["left"] = to_integers(u[:, CROP_X], 2 * augment.crop + 1)
    if augment.flip == "random":
        found["flip"] = u[:, FLIP] < 0.5
    elif augment.flip == "alternating":
        first = sample_uniforms(seed, 0, n, COLUMNS)[:, FLIP] < 0.5
        found["flip"] = first ^ bool(epoch % 2)
    if augment.cutout:
        side = torch.full((n,), augment.cutout)
        y, x = to_integers(u[:, CUTOUT_Y], height), to_integers(u[:, CUTOUT_X], width)
        found["cutout"] = boxes(y, x, side, side, height, width)
    if augment.mixes:
        odds = 0.5 if augment.mixup and augment.cutmix else float(augment.mixup > 0)
        mixup, share = u[:, MIX_CHOICE] < odds, torch.ones(n)
        if augment.mixup:
            share = torch.where(mixup, sample_betas(seed, epoch, n, augment.mixup, "mixup"), share)
        found["share"] = share
        if augment.cutmix:
            side = (1 - sample_betas(seed, epoch, n, augment.cutmix, "cutmix")).sqrt().masked_fill(mixup, 0)
            y, x = to_integers(u[:, MIX_Y], height), to_integers(u[:, MIX_X], width)
            found["paste"] = boxes(y, x, (side * height).long(), (side * width).long(), height, width)
    return Draws(**found)


def boxes(y: Tensor, x: Tensor, tall: Tensor, wide: Tensor, height: int, width: int) -> Tensor:
    """Return boxes of the given sides around the pixels (y, x), clipped at the border; int64 [n, 4]."""
    top, left = y - tall // 2, x - wide // 2
    edges = (top.clamp(min=0), (top + tall).clamp(max=height), left.clamp(min=0), (left + wide).clamp(max=width))
    return torch.stack(edges, dim=1)


def box_mask(box: Tensor, height: int, width: int) -> Tensor:
    """Return a mask of the inside of each box: bool [n, 1, height, width] from int64 [n, 4]."""
    y, x = torch.arange(height, device=box.device), torch.arange(width, device=box.device)
    rows = (y >= box[:, :1]) & (y < box[:, 1:2])
    columns = (x >= box[:, 2:3]) & (x < box[:, 3:])
    return (rows[:, :, None] & columns[:, None, :])[:, None]


def pad(images: Tensor, padding: int, fill: str) -> Tensor:
    """Pad the last two dimensions on each side by `fill`, "zero" or "reflect", for any dtype."""
    if fill == "reflect":
        for dim in (-2, -1):
            size = images.shape[dim]
            place = torch.arange(-padding, size + padding, device=images.device).abs()
            images = images.index_select(dim, torch.where(place < size, place, 2 * (size - 1) - place))
        return images
    return torch.nn.functional.pad(images, (padding,) * 4)


def crop_and_flip(images: Tensor, draws: Draws, padding: int, fill: str) -> Tensor:
    """Pad each image, flip it if `draws.flip`, and cut the window at (`draws.top`, `draws.left`)."""
    if draws.flip is not None:
        images = torch.where(draws.flip[:, None, None, None], images.flip(-1), images)
    if draws.top is None or draws.left is None:
        return images
    n, channels, height, width = images.shape
    device = images.device
    y = draws.top[:, None, None, None] + torch.arange(height, device=device)[:, None]
    x = draws.left[:, None, None, None] + torch.arange(width, device=device)
    sample = torch.arange(n, device=device)[:, None, None, None]
    return pad(images, padding, fill)[sample, torch.arange(channels, device=device)[:, None, None], y, x]


def cutout(images: Tensor, box: Tensor, fill: Tensor) -> Tensor:
    """Set the pixels inside each box to the colour `fill` [channels] (of the images' dtype)."""
    return torch.where(box_mask(box, images.shape[-2], images.shape[-1]), fill[:, None, None], images)


def mix(
    images: Tensor, partners: Tensor, labels: Tensor, partner_labels: Tensor, draws: Draws, classes: int
) -> tuple[Tensor, Tensor]:
    """Apply mixup and cutmix: float images [n, channels, height, width], probabilities [n, classes].

    Both are one weighted sum of pixels: mixup's weight is uniform, cutmix's is 0 inside its box and 1 outside. A
    label's weight is the mean weight of its image's pixels, so a box clipped at the border counts with its visible
    area.
    """
    assert draws.share is not None
    weight, share = draws.share[:, None, None, None], draws.share
    if draws.paste is not None:
        height, width = images.shape[-2:]
        top, bottom, left, right = draws.paste.unbind(1)
        area = (bottom - top).clamp(min=0) * (right - left).clamp(min=0)
        weight = weight * ~box_mask(draws.paste, height, width)
        share = share * (1 - area / (height * width))
    one_hot = torch.nn.functional.one_hot
    targets = one_hot(labels, classes) * share[:, None] + one_hot(partner_labels, classes) * (1 - share)[:, None]
    return images * weight + partners * (1 - weight), targets


class Normalizer:
    """(pixel / 255 - mean) / std per channel, on a scale from 0 to 1: one multiplication, one addition."""

    def __init__(self, mean: Sequence[float], std: Sequence[float], channels: int) -> None:
        for name, values in (("mean", mean), ("std", std)):
            given = f"data.{name}={list(values)}"
            require(len(values) == channels, f"{given} has {len(values)} values for data.channels={channels}.")
        require(min(std) > 0, f"data.std={list(std)} has a value that is not above 0.")
        mean64, std64 = torch.tensor(list(mean), dtype=torch.float64), torch.tensor(list(std), dtype=torch.float64)
        self.scale = (1 / (255 * std64)).float()[:, None, None]
        self.shift = (-mean64 / std64).float()[:, None, None]
        self.fill = (mean64 * 255).round().to(torch.uint8)  # the mean colour, uint8 [channels]

    def to(self, device: torch.device) -> "Normalizer":
        """Move the constants, in place."""
        self.scale, self.shift, self.fill = self.scale.to(device), self.shift.to(device), self.fill.to(device)
        return self

    def __call__(self, images: Tensor) -> Tensor:
        """Normalize uint8 [..., channels, height, width], or float32 from 0 to 255, to float32."""
        # three passes, each exactly rounded, so that the result does not depend on how batches are split
        return images.to(torch.float32, copy=True).mul_(self.scale).add_(self.shift)
