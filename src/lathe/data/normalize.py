"""From uint8 pixels to what a net wants to see."""

from collections.abc import Sequence

import torch
from torch import Tensor

from lathe.errors import UserError


class Normalizer:
    """(pixel / 255 - mean) / std for each channel, as one multiplication and one addition.

    Args:
        mean: of each channel, on a scale from 0 to 1.
        std: of each channel, on the same scale.

    Raises:
        UserError: unless both have one value for each channel and every std is above 0.
    """

    def __init__(self, mean: Sequence[float], std: Sequence[float], channels: int) -> None:
        for name, values in (("mean", mean), ("std", std)):
            if len(values) != channels:
                raise UserError(
                    f"data.{name}={list(values)} has {len(values)} values for data.channels={channels}: give one each."
                )
        if min(std) <= 0:
            raise UserError(
                f"data.std={list(std)} has a value that is not above 0: give each channel's standard deviation."
            )
        mean64, std64 = torch.tensor(list(mean), dtype=torch.float64), torch.tensor(list(std), dtype=torch.float64)
        self.scale = (1 / (255 * std64)).float()[:, None, None]
        self.shift = (-mean64 / std64).float()[:, None, None]
        self.fill = (mean64 * 255).round().to(torch.uint8)  # the mean colour, uint8 [channels]

    def to(self, device: torch.device) -> "Normalizer":
        """Moves the constants, in place."""
        self.scale, self.shift, self.fill = self.scale.to(device), self.shift.to(device), self.fill.to(device)
        return self

    def __call__(self, images: Tensor) -> Tensor:
        """float32 of the same shape, from uint8 [..., channels, height, width] or float32 from 0 to 255."""
        # three passes, each exactly rounded, so that the result does not depend on how a batch is cut
        return images.to(torch.float32, copy=True).mul_(self.scale).add_(self.shift)
