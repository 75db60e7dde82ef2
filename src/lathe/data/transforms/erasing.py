"""Random erasing."""

from collections.abc import Sequence
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from lathe.config.types import Positive, PositiveShare, Share
from lathe.config.validation import validated
from lathe.data.augment import box_mask
from lathe.data.random import Rng
from lathe.data.transforms.base import Transform
from lathe.data.transforms.boxes import check_fits, check_range, random_boxes


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
        scale: Annotated[Sequence[PositiveShare], Field(min_length=2, max_length=2)] = (0.02, 0.33),
        ratio: Annotated[Sequence[Positive], Field(min_length=2, max_length=2)] = (0.3, 3.3),
        fill: Literal["mean", "zero", "random"] = "mean",
    ) -> None:
        self.p, self.fill = p, fill
        self.scale, self.ratio = check_range("scale", scale), check_range("ratio", ratio)

    def check(self, channels: int, height: int, width: int) -> None:
        check_fits(self.scale, self.ratio, height, width)

    def __call__(self, images: Tensor, rng: Rng) -> Tensor:
        height, width = images.shape[-2:]
        taken = rng.uniform() < self.p
        box, found = random_boxes(rng, self.scale, self.ratio, height, width)
        mask = box_mask(box, height, width) & (taken & found)[:, None, None, None]
        if self.fill == "random":
            return torch.where(mask, rng.integers(256, *images.shape[1:]).to(images.dtype), images)
        colour = rng.fill if self.fill == "mean" and rng.fill is not None else images.new_zeros(images.shape[1])
        return torch.where(mask, colour.to(images.dtype)[:, None, None], images)
