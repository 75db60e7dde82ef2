"""Fading of channels before their removal."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from lathe.compression.channels.slices import Group


def fading(groups: Sequence[Group], chosen: Mapping[str, Sequence[int]], net: nn.Module) -> dict[str, Tensor]:
    """Return masks, True where a weight makes the output of a unit in `chosen`, by parameter name.

    A unit's output is zero if all of these are: rows and bias of each convolution that writes its channel, and the
    BatchNorms' weight and bias, whatever their running statistics.
    """
    parameters = dict(net.named_parameters())
    masks: dict[str, Tensor] = {}
    for group in groups:
        units = list(chosen.get(group.name, ()))
        for part in group.slices if units else ():
            if part.role == "out":
                mask = masks.setdefault(part.name, torch.zeros(parameters[part.name].shape, dtype=torch.bool))
                mask.index_fill_(part.dim, part.index[units].flatten(), True)
    return masks


def silence(net: nn.Module, groups: Sequence[Group], chosen: Mapping[str, Sequence[int]]) -> None:
    """Zero the weights that make the output of the chosen units, in place."""
    parameters = dict(net.named_parameters())
    with torch.no_grad():
        for name, mask in fading(groups, chosen, net).items():
            parameters[name].masked_fill_(mask.to(parameters[name].device), 0.0)


class Fade:
    """Scale masked weights in place; `weights` and `masks` have the same shapes and devices."""

    def __init__(self, weights: list[Tensor], masks: list[Tensor]) -> None:
        self.weights = weights
        self._masks = [mask.to(weight.dtype) for mask, weight in zip(masks, weights, strict=True)]
        self._factors: list[Tensor] = []
        self._factor: float | None = None

    @torch.no_grad()
    def scale(self, factor: float) -> None:
        """Multiply the masked weights by `factor`; 0 makes them exactly zero."""
        if not self.weights:
            return
        if factor != self._factor:
            self._factors = list(torch._foreach_mul(self._masks, factor - 1.0))
            torch._foreach_add_(self._factors, 1.0)
            self._factor = factor
        torch._foreach_mul_(self.weights, self._factors)
