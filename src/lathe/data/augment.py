"""Augmentation of training images: `data.augment` as steps on a batch, the built-in transforms, and normalization.

The built-in transforms (`Field`) have their random numbers drawn for a whole epoch; others (`Transform`, or a user's
functions) draw from a counter for each sample. `lathe.data.transforms` has Lathe's own of these. docs/reference/data.md
describes the arguments of all.
"""

import inspect
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import takewhile
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from lathe.config.types import Count, NonNegative, NonNegativeInt, Positive
from lathe.config.validation import validated
from lathe.data.checks import form, using
from lathe.data.random import Rng, sample_betas, sample_uniforms, to_integers, watched
from lathe.errors import ArgumentError, UserError, require

# Columns of the table of uniforms. Each method reads its own, so that switching one on does not change the others.
CROP_Y, CROP_X, FLIP, CUTOUT_Y, CUTOUT_X, MIX_CHOICE, MIX_Y, MIX_X, COLUMNS = range(9)
IMAGES = 8  # of noise, on which a user's functions are tested
NARROW = 20  # allowed shrinkage of the range of noise; a scale of 0 to 1 shrinks it more
FAR = 255  # allowed excess over 0 to 255, for an unlimited contrast
ALIKE = 1.0  # allowed difference of two calls, of 255: sums in varying order round differently


@validated
@dataclass(frozen=True)
class Augment:
    """Augmentation of training images, in this order: crop, flip, cutout, normalization, mixup or cutmix.

    The arguments are the keys of `augment` in configs/data/image_folder.yaml, which describes them. Alternating flips
    are K. Jordan's (arXiv:2404.00498): drawn in epoch 0 and then the other side at every epoch.
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
        return Draws(*(None if (value := getattr(self, f.name)) is None else call(value) for f in fields(self)))


def draw(augment: Augment, seed: int, epoch: int, n: int, height: int, width: int) -> Draws:
    """Draw the decisions of an epoch for samples 0..n-1 on the CPU, by (seed, epoch, sample) only."""
    u = sample_uniforms(seed, epoch, n, COLUMNS)
    decisions: dict[str, Tensor] = {}
    if augment.crop:
        decisions["top"] = to_integers(u[:, CROP_Y], 2 * augment.crop + 1)
        decisions["left"] = to_integers(u[:, CROP_X], 2 * augment.crop + 1)
    if augment.flip == "random":
        decisions["flip"] = u[:, FLIP] < 0.5
    elif augment.flip == "alternating":
        first = sample_uniforms(seed, 0, n, COLUMNS)[:, FLIP] < 0.5
        decisions["flip"] = first ^ bool(epoch % 2)
    if augment.cutout:
        side = torch.full((n,), augment.cutout)
        y, x = to_integers(u[:, CUTOUT_Y], height), to_integers(u[:, CUTOUT_X], width)
        decisions["cutout"] = boxes(y, x, side, side, height, width)
    if augment.mixes:
        odds = 0.5 if augment.mixup and augment.cutmix else float(augment.mixup > 0)
        mixup, share = u[:, MIX_CHOICE] < odds, torch.ones(n)
        if augment.mixup:
            share = torch.where(mixup, sample_betas(seed, epoch, n, augment.mixup, "mixup"), share)
        decisions["share"] = share
        if augment.cutmix:
            side = (1 - sample_betas(seed, epoch, n, augment.cutmix, "cutmix")).sqrt().masked_fill(mixup, 0)
            y, x = to_integers(u[:, MIX_Y], height), to_integers(u[:, MIX_X], width)
            decisions["paste"] = boxes(y, x, (side * height).long(), (side * width).long(), height, width)
    return Draws(**decisions)


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
            source = torch.arange(-padding, size + padding, device=images.device).abs()
            images = images.index_select(dim, torch.where(source < size, source, 2 * (size - 1) - source))
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
            setting = f"data.{name}={list(values)}"
            require(len(values) == channels, f"{setting} has {len(values)} values for data.channels={channels}.")
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


class Transform(ABC):
    """A transform of a batch of training images; any function `(images, rng) -> images` works too.

    `images` are [n, channels, height, width] from 0 to 255: uint8, or float32 after a function that returns it. The
    result has the same shape and dtype, or is float32. Random numbers must come from `rng`, and an image's result must
    not depend on the others in the batch, so that neither devices nor interruptions change it.
    """

    uint8_only = False  # True if it does not take float32
    is_tested: ClassVar[bool]  # for Lathe's transforms: tests replace the check at the start of a run

    def __init_subclass__(cls, is_tested: bool = False) -> None:
        super().__init_subclass__()
        cls.is_tested = is_tested  # not inherited by a user's subclass

    @abstractmethod
    def __call__(self, images: Tensor, rng: Rng) -> Tensor:
        """Return the transformed images."""

    def check(self, channels: int, height: int, width: int) -> None:  # noqa: B027 (most take all images)
        """Raise ArgumentError if it can't be used on images of this shape."""


class Field:
    """A transform that the loaders have built in; its arguments become fields of `Augment`."""

    mixes = False
    names: ClassVar[tuple[tuple[str, str], ...]]  # own arguments, and the fields of `Augment` that they become


@validated
@dataclass(frozen=True)
class RandomCrop(Field):
    """Pads each image and cuts a window of the original size out of it."""

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
    """Flips images left to right, as in `Augment`."""

    names = (("how", "flip"),)
    how: Literal["random", "alternating"] = "random"


@validated
@dataclass(frozen=True)
class Cutout(Field):
    """Sets a random square, clipped at the border, to the mean colour (DeVries et al., arXiv:1708.04552)."""

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
    """Weighted sums of two images and of their labels (Zhang et al., arXiv:1710.09412); comes last."""

    names = (("alpha", "mixup"),)
    mixes = True
    alpha: Positive


@validated
@dataclass(frozen=True)
class CutMix(Field):
    """Pastes a box of another image (Yun et al., arXiv:1905.04899); comes last. With `Mixup`, samples take either."""

    names = (("alpha", "cutmix"),)
    mixes = True
    alpha: Positive


@dataclass(frozen=True)
class Picked:
    """A batch's images for a step: indices of samples [n], random decisions, mean colour."""

    seed: int
    epoch: int
    samples: Tensor
    draws: Draws
    fill: Tensor


Step = Callable[[Tensor, Picked], Tensor]


@dataclass(frozen=True)
class Called:
    """A transform of the list, with random numbers of its `purpose`."""

    transform: Callable[[Tensor, Rng], Tensor]
    key: str
    purpose: str

    def __call__(self, images: Tensor, batch: Picked) -> Tensor:
        if images.dtype != torch.uint8 and getattr(self.transform, "uint8_only", False):
            raise UserError(
                f"{self.key}: {name_of(self.transform)} takes uint8 images, and a function before it makes them "
                "float32: let it come first."
            )
        rng = Rng(batch.seed, batch.epoch, batch.samples, self.purpose, batch.fill)
        with using(self.transform, "called", self.key):
            result = self.transform(images, rng)
        is_like = isinstance(result, Tensor) and result.shape == images.shape
        require(
            is_like and result.dtype in (images.dtype, torch.float32),
            f"{self.key}: {name_of(self.transform)} returned {form(result)}, expected {form(images)} as it was given, "
            "or float32.",
        )
        return result


@dataclass(frozen=True)
class Recipe:
    """The steps of augmentation.

    Args:
        fields: the built-in transforms, whose numbers are drawn for a whole epoch.
        at_once: whether crop and flip come first, and so are part of picking the images.
        steps: the other steps before mixing.
    """

    fields: Augment
    at_once: bool
    steps: tuple[Step, ...]

    @property
    def picking(self) -> Augment:
        """Return the crop and the flip that are part of picking the images."""
        return self.fields if self.at_once else Augment()

    def picked(self, draws: Draws) -> Draws:
        """Return the decisions for `picking`."""
        return draws if self.at_once else Draws()

    def __call__(self, images: Tensor, batch: Picked) -> Tensor:
        """Apply the steps to picked images, before normalization and mixing."""
        for step in self.steps:
            images = step(images, batch)
        return images


def recipe(augment: Any, shape: tuple[int, int, int] | None = None) -> Recipe:
    """Return the recipe of `data.augment`: None, `Augment`, a list of transforms and functions, or one.

    `shape` is channels, height and width, if known.
    """
    if isinstance(augment, Recipe):
        return augment
    items, built_in = _items_of(augment), dict[str, Any]()
    steps: list[Step] = []
    seen: Counter[str] = Counter()
    mixing, wrong = "", list[str]()
    for key, item in items.items():
        name = name_of(item)
        if isinstance(item, type) or not (callable(item) or isinstance(item, Field)):
            what = f"the class {item.__name__}, not made" if isinstance(item, type) else form(item)
            raise ArgumentError(f"{key} is {what}: expected one of Lathe's transforms or a function of (images, rng).")
        if shape is not None and isinstance(item, (RandomCrop, Cutout, Transform)):
            try:
                item.check(*shape)
            except ArgumentError as error:  # of the item, or of the field of `Augment` that it stands for
                listed = "[" in key
                wrong += [f"{key}.{text}" if listed else f"{key}={text.partition('=')[2]}" for text in error.args]
        if mixing and not getattr(item, "mixes", False):
            raise ArgumentError(f"{key}: {name} comes after {mixing}, which mixes samples: put it before.")
        if isinstance(item, Field):
            if seen[name]:
                raise ArgumentError(f"{key}: {name} stands in the list twice: keep one.")
            built_in |= {field: getattr(item, argument) for argument, field in item.names}
            if item.mixes:
                mixing = mixing or name
            else:
                steps.append(partial(_apply_field, item))
        else:
            steps.append(Called(item, f"data.{key}", f"{name}/{seen[name]}"))
        seen[name] += 1
    if wrong:
        raise ArgumentError(*wrong)
    is_picked = [isinstance(item, (RandomCrop, RandomFlip)) for item in items.values()]
    head = len([*takewhile(bool, is_picked)])
    at_once = not any(is_picked[head:])  # a later crop or flip is a separate step
    return Recipe(Augment(**built_in), at_once, tuple(steps[head if at_once else 0 :]))


def _items_of(augment: Any) -> dict[str, Any]:
    """Return the transforms and functions of `data.augment` in order, by their keys."""
    if augment is None:
        return {}
    if not isinstance(augment, Augment):
        listed = [augment] if callable(augment) or isinstance(augment, Field) else augment
        if not isinstance(listed, Sequence) or isinstance(listed, str):
            raise ArgumentError(f"augment={augment!r}: expected a list of transforms, or lathe.data.Augment.")
        return {f"augment[{number}]": item for number, item in enumerate(listed)}
    items: dict[str, Any] = {}
    if augment.crop:
        items["augment.crop"] = RandomCrop(augment.crop, augment.crop_fill)
    if augment.flip != "none":
        items["augment.flip"] = RandomFlip(augment.flip)
    kinds: dict[str, Callable[[Any], Field]] = {"cutout": Cutout, "mixup": Mixup, "cutmix": CutMix}
    return items | {f"augment.{name}": kind(value) for name, kind in kinds.items() if (value := getattr(augment, name))}


def _apply_field(item: Field, images: Tensor, batch: Picked) -> Tensor:
    if isinstance(item, RandomCrop):
        return crop_and_flip(images, replace(batch.draws, flip=None), item.padding, item.fill)
    if isinstance(item, RandomFlip):
        return crop_and_flip(images, Draws(flip=batch.draws.flip), 0, "zero")
    assert batch.draws.cutout is not None
    return cutout(images, batch.draws.cutout, batch.fill.to(images.dtype))


def name_of(item: Any) -> str:
    """Return the name of a transform or function."""
    item = item.func if isinstance(item, partial) else item
    return item.__name__ if inspect.isroutine(item) else type(item).__name__


def check_folded(recipe: Recipe) -> None:
    """Raise UserError if images that are normalized before picking can't be transformed so."""
    require(
        recipe.at_once and not any(isinstance(step, Called) for step in recipe.steps),
        "data.normalize=folded normalises before anything else, so data.augment may list only RandomCrop and "
        "RandomFlip, at its start, Cutout, Mixup and CutMix: use data.normalize=batch.",
    )


def try_out(recipe: Recipe, shape: tuple[int, int, int], device: torch.device | None = None) -> None:
    """Check on a few noise images that a user's functions keep shape and scale, and depend on image and `rng` alone.

    The global generators are restored.
    """
    if not any(isinstance(step, Called) for step in recipe.steps):
        return
    noise = torch.randint(0, 256, (IMAGES, *shape), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    images = (noise * torch.linspace(0.3, 1, IMAGES)[:, None, None, None]).to(torch.uint8).to(device)  # dark to bright
    draws = draw(recipe.fields, 0, 0, IMAGES, *shape[1:]).to(images.device)
    fill = torch.full(shape[:1], 128, dtype=torch.uint8, device=images.device)
    batch = Picked(0, 0, torch.arange(IMAGES, device=images.device), draws, fill)
    pair = torch.tensor([IMAGES // 2, 1], device=images.device)
    apart = replace(batch, samples=batch.samples[pair], draws=batch.draws[pair])
    for step in recipe.steps:
        inputs = images
        images, drew = watched(partial(step, inputs.clone(), batch))
        if not isinstance(step, Called) or getattr(step.transform, "is_tested", False):
            continue
        start = f"{step.key}: {name_of(step.transform)}"
        require(
            not drew,
            f"{start} draws from random, numpy.random or torch, which no device and no continued run repeats: draw from"
            " its second argument, rng.",
        )
        (least, most), (low, high) = ((float(each.min()), float(each.max())) for each in (inputs, images))
        require(
            high - low >= (most - least) / NARROW and low >= -FAR and high <= 255 + FAR,  # False for NaN
            f"{start} returned numbers from {low:.3g} to {high:.3g} for images from {least:.3g} to {most:.3g}: expected"
            " the scale that it was given, 0 to 255, which is normalised afterwards.",
        )
        repeated = watched(partial(step, inputs[pair], apart))[0]
        require(
            repeated.dtype == images.dtype and bool(((repeated.float() - images[pair].float()).abs() <= ALIKE).all()),
            f"{start} gives another image when it is called with other images, or again: let each image depend on "
            "itself and rng alone.",
        )
