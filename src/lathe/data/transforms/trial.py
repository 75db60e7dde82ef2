"""Smoke test of a user's augmentation functions on a few images."""

from functools import partial

import torch
from torch import Tensor

from lathe.data.augment import draw
from lathe.data.generators import watched
from lathe.data.transforms.recipe import Called, Picked, Recipe, name_of
from lathe.errors import UserError

IMAGES = 8
NARROW = 20  # allowed shrinkage of the range of noise; a scale of 0 to 1 shrinks it more
FAR = 255  # allowed excess over 0 to 255, for an unlimited contrast
ALIKE = 1.0  # allowed difference of two calls, of 255: sums in varying order round differently


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
    noise = (noise * torch.linspace(0.3, 1, IMAGES)[:, None, None, None]).to(torch.uint8)  # of different brightness
    draws = draw(recipe.fields, 0, 0, IMAGES, *shape[1:])
    fill = torch.full(shape[:1], 128, dtype=torch.uint8)
    images, place = noise.to(device), device or noise.device
    whole = Picked(0, 0, torch.arange(IMAGES, device=place), draws.to(place), fill.to(place))
    for step in recipe.steps:
        given = images
        images, moved = watched(partial(step, given.clone(), whole))
        if isinstance(step, Called) and not vars(type(step.transform)).get("is_tested", False):
            _judge(step, given, images, whole, moved)


def _judge(step: Called, given: Tensor, first: Tensor, batch: Picked, moved: bool) -> None:
    start = f"{step.key}: {name_of(step.transform)}"
    if moved:
        raise UserError(
            f"{start} draws from random, numpy.random or torch, which no device and no continued run repeats: draw "
            "from its second argument, rng."
        )
    if first.is_floating_point() and not first.isfinite().all():
        raise UserError(f"{start} returned NaN or infinity: expected numbers from 0 to 255.")
    low, high = _range(first)
    span = _range(given)[1] - _range(given)[0]
    if high - low < span / NARROW or low < -FAR or high > 255 + FAR:
        raise UserError(
            f"{start} returned numbers from {low:.3g} to {high:.3g} for images from {_range(given)[0]:.3g} to "
            f"{_range(given)[1]:.3g}: expected the scale that it was given, 0 to 255, which is normalised afterwards."
        )
    again = watched(partial(step, given.clone(), batch))[0]
    if not _alike(first, again):
        raise UserError(
            f"{start} gives other images when it is called again with the same numbers: let it draw from its second "
            "argument, rng, alone."
        )
    some = torch.tensor([IMAGES // 2, 1], device=given.device)
    apart = Picked(batch.seed, batch.epoch, batch.samples[some], batch.draws[some], batch.fill)
    if not _alike(first[some], watched(partial(step, given[some], apart))[0]):
        raise UserError(
            f"{start} does to an image what depends on the others of its batch, which other devices have: let each "
            "image depend on itself and rng alone."
        )


def _range(images: Tensor) -> tuple[float, float]:
    return float(images.min()), float(images.max())


def _alike(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and bool(((one.float() - other.float()).abs() <= ALIKE).all())
