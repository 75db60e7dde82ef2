"""Conversion of `data.augment` to the steps of the loaders, and a test of a user's functions."""

import inspect
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor

from lathe.data.augment import Augment, Draws, crop_and_flip, cutout, draw
from lathe.data.checks import form, using
from lathe.data.random import Rng, watched
from lathe.data.transforms import Field, RandomCrop, RandomFlip, Transform, items_of
from lathe.errors import ArgumentError, UserError, require

IMAGES = 8  # of noise, on which a user's functions are tested
NARROW = 20  # allowed shrinkage of the range of noise; a scale of 0 to 1 shrinks it more
FAR = 255  # allowed excess over 0 to 255, for an unlimited contrast
ALIKE = 1.0  # allowed difference of two calls, of 255: sums in varying order round differently


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
            given = self.transform(images, rng)
        fits = (
            isinstance(given, Tensor) and given.shape == images.shape and given.dtype in (images.dtype, torch.float32)
        )
        if not fits:
            raise UserError(
                f"{self.key}: {name_of(self.transform)} returned {form(given)}, expected {form(images)} as it was "
                "given, or float32."
            )
        return given


@dataclass(frozen=True)
class Recipe:
    """The steps of augmentation.

    Args:
        fields: the built-in transforms, whose numbers are drawn for a whole epoch.
        at_once: whether crop and flip come first, and so are part of picking the images.
        steps: the other steps before mixing.
        own: those of the steps that are transforms or functions.
    """

    fields: Augment
    at_once: bool
    steps: tuple[Step, ...]
    own: tuple[Called, ...] = ()

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

    Raises:
        ArgumentError: an item is not a transform, is misplaced, or does not fit the shape.
    """
    if isinstance(augment, Recipe):
        return augment
    if augment is None or isinstance(augment, Augment):
        fields = items_of(augment or Augment())
        return _of_list([*fields.values()], [f"augment.{name}" for name in fields], shape)
    single = callable(augment) or isinstance(augment, Field)
    if not single and (isinstance(augment, (str, Mapping)) or not isinstance(augment, Sequence)):
        raise ArgumentError(f"augment={augment!r}: expected a list of transforms, or lathe.data.Augment.")
    items = [augment] if single else list(augment)
    return _of_list(items, [f"augment[{number}]" for number in range(len(items))], shape)


def check_folded(found: Recipe) -> None:
    """Raise UserError if images that are normalized before picking can't be transformed so."""
    require(
        found.at_once and not found.own,
        "data.normalize=folded normalises before anything else, so data.augment may list only RandomCrop and "
        "RandomFlip, at its start, Cutout, Mixup and CutMix: use data.normalize=batch.",
    )


def _of_list(items: list[Any], keys: list[str], shape: tuple[int, int, int] | None) -> Recipe:
    fields: dict[str, Any] = {}
    steps: list[Step] = []
    seen: Counter[str] = Counter()
    mixing, wrong = "", list[str]()
    for key, item in zip(keys, items, strict=True):
        name = name_of(item)
        if isinstance(item, type) or not (callable(item) or isinstance(item, Field)):
            what = f"the class {item.__name__}, not made" if isinstance(item, type) else form(item)
            raise ArgumentError(f"{key} is {what}: expected one of Lathe's transforms or a function of (images, rng).")
        if shape is not None and isinstance(item, (Field, Transform)):
            wrong += _misfits(item, key, shape)
        if mixing and not getattr(item, "mixes", False):
            raise ArgumentError(f"{key}: {name} comes after {mixing}, which mixes samples: put it before.")
        if isinstance(item, Field):
            if seen[name]:
                raise ArgumentError(f"{key}: {name} stands in the list twice: keep one.")
            fields |= item.fields()
            if item.mixes:
                mixing = mixing or name
            else:
                steps.append(_built_in(item))
        else:
            steps.append(Called(item, f"data.{key}", f"{name}/{seen[name]}"))
        seen[name] += 1
    if wrong:
        raise ArgumentError(*wrong)
    head = len([*takewhile(_is_picked, items)])
    at_once = not any(map(_is_picked, items[head:]))  # a later crop or flip is a separate step
    own = tuple(step for step in steps if isinstance(step, Called))
    return Recipe(Augment(**fields), at_once, tuple(steps[head if at_once else 0 :]), own)


def _is_picked(item: Any) -> bool:
    return isinstance(item, (RandomCrop, RandomFlip))


def _misfits(item: Field | Transform, key: str, shape: tuple[int, int, int]) -> list[str]:
    """Return why the item, or the field of `Augment` that it stands for, can't be used on images of this shape."""
    try:
        item.check(*shape)
    except ArgumentError as error:
        if "[" in key:
            return [f"{key}.{sentence}" for sentence in error.args]
        return [f"{key}={sentence.partition('=')[2]}" for sentence in error.args]
    return []


def _built_in(item: Field) -> Step:
    if isinstance(item, RandomCrop):
        padding, fill = item.padding, item.fill
        return lambda images, batch: crop_and_flip(images, replace(batch.draws, flip=None), padding, fill)
    if isinstance(item, RandomFlip):
        return lambda images, batch: crop_and_flip(images, Draws(flip=batch.draws.flip), 0, "zero")
    return _cutout


def _cutout(images: Tensor, batch: Picked) -> Tensor:
    assert batch.draws.cutout is not None
    return cutout(images, batch.draws.cutout, batch.fill.to(images.dtype))


def name_of(item: Any) -> str:
    """Return the name of a transform or function."""
    item = item.func if isinstance(item, partial) else item
    return item.__name__ if inspect.isroutine(item) else type(item).__name__


def try_out(recipe: Recipe, shape: tuple[int, int, int], device: torch.device | None = None) -> None:
    """Run `data.augment` on a few noise images, and check that user functions are reproducible.

    The global generators are restored.

    Raises:
        UserError: a function fails, draws from other generators than its `rng`, returns NaN, another shape or scale, or
            depends on other images of the batch.
    """
    if not recipe.own:
        return
    noise = torch.randint(0, 256, (IMAGES, *shape), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    images = (noise * torch.linspace(0.3, 1, IMAGES)[:, None, None, None]).to(torch.uint8).to(device)  # dark to bright
    draws = draw(recipe.fields, 0, 0, IMAGES, *shape[1:]).to(images.device)
    fill = torch.full(shape[:1], 128, dtype=torch.uint8, device=images.device)
    batch = Picked(0, 0, torch.arange(IMAGES, device=images.device), draws, fill)
    for step in recipe.steps:
        given = images
        images, moved = watched(partial(step, given.clone(), batch))
        if isinstance(step, Called) and not vars(type(step.transform)).get("is_tested", False):
            _judge(step, given, images, batch, moved)


def _judge(step: Called, given: Tensor, first: Tensor, batch: Picked, moved: bool) -> None:
    start = f"{step.key}: {name_of(step.transform)}"
    require(
        not moved,
        f"{start} draws from random, numpy.random or torch, which no device and no continued run repeats: draw from its"
        " second argument, rng.",
    )
    (least, most), (low, high) = ((float(some.min()), float(some.max())) for some in (given, first))
    require(
        high - low >= (most - least) / NARROW and low >= -FAR and high <= 255 + FAR,  # False for NaN
        f"{start} returned numbers from {low:.3g} to {high:.3g} for images from {least:.3g} to {most:.3g}: expected "
        "the scale that it was given, 0 to 255, which is normalised afterwards.",
    )
    some = torch.tensor([IMAGES // 2, 1], device=given.device)
    apart = replace(batch, samples=batch.samples[some], draws=batch.draws[some])
    again = watched(partial(step, given[some], apart))[0]
    require(
        again.dtype == first.dtype and bool(((again.float() - first[some].float()).abs() <= ALIKE).all()),
        f"{start} gives another image when it is called with other images, or again: let each image depend on itself "
        "and rng alone.",
    )
