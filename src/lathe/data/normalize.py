"""Normalization of uint8 pixels."""

from collections.abc import Sequence

import torch
from torch import Tensor

from lathe.errors import UserError


class Normalizer:
    """(pixel / 255 - mean) / std per channel, on a scale from 0 to 1: one multiplication, one addition."""

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
        """Move the constants, in place."""
        self.scale, self.shift, self.fill = self.scale.to(device), self.shift.to(device), self.fill.to(device)
        return self

    def __call__(self, images: Tensor) -> Tensor:
        """Normalize uint8 [..., channels, height, width], or float32 from 0 to 255, to float32."""
        # three passes, each exactly rounded, so that the result does not depend on how batches are split
        return images.to(torch.float32, copy=True).mul_(self.scale).add_(self.shift)
