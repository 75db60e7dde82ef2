"""Random resized crop."""

from collections.abc import Sequence
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from lathe.config.types import Positive, PositiveShare
from lathe.config.validation import validated
from lathe.data.random import Rng
from lathe.data.transforms.base import Transform
from lathe.data.transforms.boxes import check_range, random_boxes


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
        scale: Annotated[Sequence[PositiveShare], Field(min_length=2, max_length=2)] = (0.08, 1.0),
        ratio: Annotated[Sequence[Positive], Field(min_length=2, max_length=2)] = (3 / 4, 4 / 3),
    ) -> None:
        self.scale, self.ratio = check_range("scale", scale), check_range("ratio", ratio)

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
