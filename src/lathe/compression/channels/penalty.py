"""Penalties on weak units, so that their removal loses little."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lathe.compression.channels.scores import per_unit
from lathe.compression.channels.slices import Group, Slice

PENALTIES = ("group_norm", "group_lasso", "bn_scale")
ALPHA = 4.0  # as Torch-Pruning: the weakest unit's penalty is 2**ALPHA times the strongest's


@torch.no_grad()
def add_penalty(net: nn.Module, groups: Sequence[Group], kind: str, strength: float) -> None:
    """Add the gradient of a penalty to the gradients of `net`, in place.

    - `group_norm`: strength x 2^(4 (max - I) / (max - min)) x weight, where I is the norm of a unit's weights (Fang et
      al. 2023, DepGraph, arXiv:2301.12900, as in Torch-Pruning's GroupNormPruner).
    - `group_lasso`: strength x weight / I (Yuan and Lin 2006; Wen et al. 2016, arXiv:1608.03665).
    - `bn_scale`: strength x sign of BatchNorm's weights (Liu et al. 2017, Network Slimming, arXiv:1708.06519).
    """
    tensors = dict(net.named_parameters())
    for group in groups:
        parts = [part for part in group.slices if part.tensor == "weight" and tensors[part.name].grad is not None]
        if kind == "bn_scale":
            for part in parts:
                weight = tensors[part.name]
                if weight.dim() == 1:
                    _push(weight, weight.sign(), part, weight.new_full((group.units,), strength))
            continue
        squares = torch.stack([per_unit(tensors[part.name].square(), part) for part in parts])
        if kind == "group_norm":
            norm = squares.mean(0)
            norm = (norm / norm.mean()).sqrt()
            spread = (norm.max() - norm.min()).clamp_min(1e-12)
            factor = strength * 2 ** (ALPHA * (norm.max() - norm) / spread)
        else:
            factor = strength / squares.sum(0).sqrt().clamp_min(1e-12)
        for part in parts:
            _push(tensors[part.name], tensors[part.name], part, factor)


def _push(weight: Tensor, direction: Tensor, part: Slice, factor: Tensor) -> None:
    """Add factor `[units]` x direction to the gradient at each unit's positions."""
    shape = [1] * weight.dim()
    shape[part.dim] = weight.shape[part.dim]
    index = part.index.to(weight.device)
    spread = factor.new_zeros(weight.shape[part.dim]).index_put_((index,), factor.view(-1, 1).expand_as(index))
    assert weight.grad is not None
    weight.grad.addcmul_(direction, spread.view(shape))
