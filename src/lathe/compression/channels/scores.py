"""Importance of the units of a group; the lowest scores are removed."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lathe.compression.channels.slices import Group, Slice
from lathe.config.types import ChannelImportance
from lathe.config.validation import validated
from lathe.errors import ArgumentError


@validated
def scores(
    groups: Sequence[Group],
    tensors: Mapping[str, Tensor],
    importance: ChannelImportance = "group_norm",
    *,
    sensitivity: Mapping[str, Tensor] | None = None,
    seed: int = 0,
) -> dict[str, Tensor]:
    """Return a score `[units]` for each group by name, with mean 1 so that groups can be compared.

    Args:
        tensors: a net's full parameters by name.
        importance: `group_norm`, mean square of a unit's weights (Fang et al. 2023, DepGraph, arXiv:2301.12900); `l1`
            or `l2`, norm of the weights that make its output (Li et al. 2017, arXiv:1608.08710); `bn_scale`, magnitude
            of its BatchNorm weights (Liu et al. 2017, Network Slimming, arXiv:1708.06519); `taylor`, first-order change
            of the loss (Molchanov et al. 2019, arXiv:1906.10771), given as `sensitivity`; `random`.
    """
    generator = torch.Generator().manual_seed(seed)
    found: dict[str, Tensor] = {}
    for group in groups:
        if importance == "random":
            score = torch.rand(group.units, generator=generator)
        elif importance == "taylor":
            score = (sensitivity or {}).get(group.name, torch.zeros(group.units)).detach().float().cpu()
        elif importance == "group_norm":
            parts = [per_unit(tensors[part.name].float().square(), part) for part in group.slices if _weighs(part)]
            score = torch.stack(parts).mean(0)
        elif importance == "bn_scale":
            scales = [
                tensors[part.name].float().abs()
                for part in group.slices
                if _weighs(part) and tensors[part.name].dim() == 1
            ]
            norms = [part for part in group.slices if _weighs(part) and tensors[part.name].dim() == 1]
            if not norms:
                raise ArgumentError(
                    f"importance=bn_scale: {group.name} has no BatchNorm; use group_norm, or list it under exclude."
                )
            score = torch.stack([per_unit(scale, part) for scale, part in zip(scales, norms, strict=True)]).mean(0)
        else:
            power = 1 if importance == "l1" else 2
            rows = [part for part in group.slices if part.role == "out" and tensors[part.name].dim() > 1]
            score = torch.stack([per_unit(tensors[part.name].float().abs() ** power, part) for part in rows]).sum(
                0
            ) ** (1 / power)
        score = score.detach().cpu()
        found[group.name] = score / score.mean().clamp_min(torch.finfo(torch.float32).tiny)
    return found


def loss_change(
    groups: Sequence[Group], tensors: Mapping[str, Tensor], gradients: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return each unit's squared sum of weight x gradient; its mean over batches is `sensitivity`."""
    found = {}
    for group in groups:
        makers = [part for part in group.slices if part.role == "out" and part.name in gradients]
        products = [per_unit((tensors[part.name] * gradients[part.name]).float(), part) for part in makers]
        found[group.name] = torch.stack(products).sum(0).square() if products else torch.zeros(group.units)
    return found


def per_unit(values: Tensor, part: Slice) -> Tensor:
    """Sum `values`, shaped as the slice's tensor, over each unit's positions: `[units]`."""
    sums = values.sum([dim for dim in range(values.dim()) if dim != part.dim]) if values.dim() > 1 else values
    return sums[part.index.to(values.device)].sum(1)


def _weighs(part: Slice) -> bool:
    return part.tensor == "weight"
