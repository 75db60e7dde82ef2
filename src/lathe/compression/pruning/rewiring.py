"""Sparse training with other weights than pruning leaves: dynamic masks, and lottery tickets.

RigL, growth by gradients: Evci et al. 2020, arXiv:1911.11134. SET, random growth: Mocanu et al. 2018, arXiv:1707.04780.
Lottery tickets prune the smallest trained weights, rewind the others and train again: Frankle and Carbin 2019,
arXiv:1803.03635; rewinding to a later step: Frankle et al. 2020, arXiv:1912.05671.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn

from lathe.compression.pruning.masks import Masks, lowest
from lathe.config.types import OpenShare
from lathe.config.validation import validated
from lathe.measure.processes import processes
from lathe.measure.shards import is_sharded, local, part_of, whole


@validated
def erdos_renyi_kernel(shapes: Mapping[str, Sequence[int]], sparsity: OpenShare) -> dict[str, float]:
    """Return densities in proportion to sum(shape) / prod(shape), at most 1: small tensors are denser.

    In total `1 - sparsity` of the weights are kept. ERK of Evci et al. 2020, after Mocanu et al. 2018.
    """
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    ratios = {name: sum(shape) / sizes[name] for name, shape in shapes.items()}
    dense: set[str] = set()
    while True:
        rest = [name for name in shapes if name not in dense]
        room = (1 - sparsity) * sum(sizes.values()) - sum(sizes[name] for name in dense)
        scale = room / sum(ratios[name] * sizes[name] for name in rest) if rest else 0.0
        full = {name for name in rest if scale * ratios[name] > 1}
        if not full:
            return {name: 1.0 if name in dense else scale * ratios[name] for name in shapes}
        # as in the authors' code: the tensors of the highest ratio become dense, and the others share the rest
        highest = max(ratios[name] for name in full)
        dense |= {name for name in full if ratios[name] == highest}


def random_masks(shapes: Mapping[str, Sequence[int]], densities: Mapping[str, float], seed: int) -> Masks:
    """Return random masks (True: kept) of `round(density * n)`, at least one, on the CPU, by seed."""
    scores = {name: random_scores(shape, seed, 0, index) for index, (name, shape) in enumerate(shapes.items())}
    return largest_masks(scores, densities)


def largest_masks(scores: Mapping[str, Tensor], densities: Mapping[str, float]) -> Masks:
    """Return masks (True: kept) of the `round(density * n)`, at least one, largest scores."""
    return {name: lowest(-score, max(1, round(densities[name] * score.numel()))) for name, score in scores.items()}


def random_scores(shape: Sequence[int], seed: int, step: int, index: int) -> Tensor:
    """Return uniform numbers that depend only on (seed, step, index), made on the CPU for all devices."""
    word = ((seed * 1_000_003 + step) * 1_000_003 + index) % 2**63
    return torch.rand(tuple(shape), generator=torch.Generator().manual_seed(word))


def cosine_fraction(step: int, end: int, fraction: float) -> float:
    """Return the share of a layer's weights to exchange: half a cosine from `fraction` at 0 to 0 at `end`."""
    return fraction / 2 * (1 + math.cos(math.pi * min(step, end) / end)) if end > 0 else 0.0


def exchange(weight: Tensor, mask: Tensor, growth: Tensor, fraction: float) -> Tensor:
    """Return the mask after dropping `fraction` of the kept weights by magnitude and growing as many.

    Places of largest `growth` grow: |gradient| for RigL, random numbers for SET; as in the paper, also those just
    dropped, which keep their weight. All arguments have the weight's shape.
    """
    mask = mask.bool()
    kept = int(mask.sum())
    moved = min(int(fraction * kept), mask.numel() - kept)
    if moved == 0:
        return mask.clone()
    stays = lowest(-weight.detach().abs().float().masked_fill(~mask, -1.0), kept - moved)
    return stays | lowest(-growth.detach().float().masked_fill(stays, -math.inf), moved)


@validated
def round_sparsities(sparsity: OpenShare, rounds: Annotated[int, Field(ge=2)]) -> list[float]:
    """Return the share of zeros in each of `rounds` trainings: from 0 to `sparsity`, geometrically."""
    return [1 - (1 - sparsity) ** (k / (rounds - 1)) for k in range(rounds)]


def copy_state(net: nn.Module) -> dict[str, Tensor]:
    """Copy weights and buffers of `net` to the CPU, whole and as rank 0 has them. A collective."""
    saved = {}
    for name, tensor in net.state_dict(keep_vars=True).items():
        value = whole(tensor)
        if not is_sharded(tensor) and processes() > 1:
            value = value.clone()
            torch.distributed.broadcast(value, src=0)
        saved[name] = value.to("cpu", copy=True)
    return saved


@torch.no_grad()
def rewind(net: nn.Module, saved: Mapping[str, Tensor], masks: Mapping[str, Tensor] | None = None) -> None:
    """Load what `copy_state` returned into `net`, in place, with zeros where `masks` are False."""
    for name, tensor in net.state_dict(keep_vars=True).items():
        mask = (masks or {}).get(name)
        value = saved[name] if mask is None else saved[name] * mask.to(saved[name].device)
        local(tensor).copy_(part_of(value.to(tensor.device), tensor))
