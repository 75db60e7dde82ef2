"""Preprocessing of pixels as part of the exported graph."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lathe.errors import require

ANY = "any"
LARGEST = 4096  # pixels of a fixed side; larger images need "any", or scaling by the client


class Preprocess(nn.Module):
    """Scales uint8 pixels `[batch, channels, height, width]` to the net's size and normalizes them.

    Without scaling, the result equals `lathe.data.Normalizer` bit for bit. Scaling is that of
    `lathe.images.scaled` (the largest centered window of the net's aspect ratio, an antialiased bilinear
    filter) without rounding to integers, as two matrix products, which every back end has.

    Args:
        mean: of each channel, pixels on a scale from 0 to 1.
        std: of each channel, on the same scale.
        size: height and width that the net takes.
        input_size: height and width of the input, "any" for images of any size, or None for the net's.

    Raises:
        UserError: `input_size` is invalid, or as `Normalizer`.
    """

    scale: Tensor
    shift: Tensor

    def __init__(
        self,
        mean: Sequence[float],
        std: Sequence[float],
        size: tuple[int, int],
        input_size: Sequence[int] | str | None = None,
    ) -> None:
        super().__init__()
        # imported late: it imports Lightning, which takes seconds that a server does not need to spend
        from lathe.data.augment import Normalizer

        normalizer = Normalizer(mean, std, len(mean))
        self.register_buffer("scale", normalizer.scale)
        self.register_buffer("shift", normalizer.shift)
        self.size = size
        self.input_size = check_input_size(input_size, size)
        if isinstance(self.input_size, tuple) and self.input_size != size:
            step = window_step(*self.input_size, size)
            self.register_buffer("rows", filter_matrix(self.input_size[0], size[0], step))
            self.register_buffer("columns", filter_matrix(self.input_size[1], size[1], step))

    def forward(self, pixels: Tensor) -> Tensor:
        x = pixels.float()
        if self.input_size == ANY:
            height, width = x.shape[-2:]
            step = window_step(height, width, self.size)
            x = filter_matrix(height, self.size[0], step) @ x @ filter_matrix(width, self.size[1], step).t()
        elif self.input_size != self.size:
            x = self.rows @ x @ self.columns.t()  # type: ignore[operator]
        return x * self.scale + self.shift


def check_input_size(given: Any, size: tuple[int, int]) -> tuple[int, int] | str:
    """Return height and width of the input, or "any"."""
    if given is None:
        return size
    if given == ANY:
        return ANY
    sides = [given, given] if isinstance(given, int) else given
    pair = isinstance(sides, (list, tuple)) and len(sides) == 2
    require(
        pair and all(type(side) is int and 1 <= side <= LARGEST for side in sides),
        f"target.input_size={given}: give [height, width] in pixels, up to {LARGEST} each, any, or null.",
    )
    height, width = sides
    return height, width


def window_step(height: Any, width: Any, size: tuple[int, int]) -> Tensor:
    """Return the input pixels per output pixel of the largest window. Height and width may be symbolic."""
    return torch.minimum(torch.ones(()) * (height / size[0]), torch.ones(()) * (width / size[1]))


def filter_matrix(source: Any, size: int, step: Tensor) -> Tensor:
    """Return the weights `[size, source]` of a triangle filter that resamples the centered window.

    The window has `size` x `step` values. When it shrinks, the filter is as wide as a step, so that every value counts.
    `source` may be symbolic.
    """
    width = torch.clamp(step, min=1.0)
    centres = torch.ones(()) * (source / 2) + (torch.arange(size) + (1 - size) / 2) * step
    places = torch.arange(source) + 0.5
    weights = (1 - (places[None, :] - centres[:, None]).abs() / width).clamp_min(0)
    return weights / weights.sum(1, keepdim=True)


class Shipped(nn.Module):
    """A net with its preprocessing, for files that take pixels."""

    def __init__(self, net: nn.Module, preprocess: Preprocess) -> None:
        super().__init__()
        self.preprocess, self.net = preprocess, net
        self.eval()

    def forward(self, pixels: Tensor) -> Any:
        return self.net(self.preprocess(pixels))
