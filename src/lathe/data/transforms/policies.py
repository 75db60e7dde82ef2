"""RandAugment and TrivialAugment: operations drawn per sample from one list, on batches."""

from abc import abstractmethod
from collections.abc import Callable
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from lathe.config.types import NonNegativeInt
from lathe.config.validation import validated
from lathe.data.random import Rng
from lathe.data.transforms import ops
from lathe.data.transforms.base import Transform
from lathe.errors import ArgumentError

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
        num_ops: Annotated[int, Field(ge=1, le=64)] = 2,
        magnitude: NonNegativeInt = 9,
        num_bins: Annotated[int, Field(ge=2)] = 31,
    ) -> None:
        self.num_ops, self.magnitude, self.bins = num_ops, magnitude, num_bins
        if magnitude >= num_bins:
            raise ArgumentError(f"magnitude={magnitude} is no bin of num_bins={num_bins}: choose 0 to {num_bins - 1}.")

    def levels(self, height: int, width: int) -> dict[str, Levels]:
        return {
            "shear_x": (0, 0.3),
            "shear_y": (0, 0.3),
            "translate_x": (0, 150 / 331 * width),
            "translate_y": (0, 150 / 331 * height),
            "rotate": (0, 30),
            "brightness": (0, 0.9),
            "color": (0, 0.9),
            "contrast": (0, 0.9),
            "sharpness": (0, 0.9),
            "posterize": (8, 4),
            "solarize": (255, 0),
        }

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
    def __init__(self, num_bins: Annotated[int, Field(ge=2)] = 31) -> None:
        self.bins = num_bins

    def levels(self, height: int, width: int) -> dict[str, Levels]:
        return {
            "shear_x": (0, 0.99),
            "shear_y": (0, 0.99),
            "translate_x": (0, 32),
            "translate_y": (0, 32),
            "rotate": (0, 135),
            "brightness": (0, 0.99),
            "color": (0, 0.99),
            "contrast": (0, 0.99),
            "sharpness": (0, 0.99),
            "posterize": (8, 2),
            "solarize": (255, 0),
        }

    def __call__(self, images: Tensor, rng: Rng) -> Tensor:
        return self.apply(images, rng.integers(len(OPS)), rng.integers(self.bins), rng.uniform() < 0.5)
