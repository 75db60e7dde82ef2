"""Sparse from the first step to the last: weights that stay small are dropped, and others grow in their place.

RigL: Evci et al. 2020, "Rigging the Lottery: Making All Tickets Winners", arXiv:1911.11134. Random growth is SET:
Mocanu et al. 2018, "Scalable training of artificial neural networks with adaptive sparse connectivity",
arXiv:1707.04780.
"""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lathe.config.types import OpenShare
from lathe.config.validation import validated


@validated
def uniform(shapes: Mapping[str, Sequence[int]], sparsity: OpenShare) -> dict[str, float]:
    """The same density, the share of weights that are kept, for each tensor."""
    return dict.fromkeys(shapes, 1 - sparsity)


@validated
def erdos_renyi_kernel(shapes: Mapping[str, Sequence[int]], sparsity: OpenShare) -> dict[str, float]:
    """A density for each tensor, in proportion to sum(shape) / prod(shape) and at most 1, so that all of them together
    keep `1 - sparsity` of the weights: small tensors stay denser than large ones. ERK of Evci et al. 2020, after Mocanu
    et al. 2018.
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
        # As in the authors' code: the tensors with the highest ratio become dense, and the rest share what remains.
        highest = max(ratios[name] for name in full)
        dense |= {name for name in full if ratios[name] == highest}


def random_masks(shapes: Mapping[str, Sequence[int]], densities: Mapping[str, float], seed: int) -> dict[str, Tensor]:
    """Masks (True: kept) on the CPU with exactly `round(density * n)`, at least one, random places; equal for equal
    seeds.
    """
    masks = {}
    for index, (name, shape) in enumerate(shapes.items()):
        kept = max(1, round(densities[name] * math.prod(shape)))
        masks[name] = _largest(random_scores(shape, seed, 0, index), kept)
    return masks


def magnitude_masks(weights: Mapping[str, Tensor], densities: Mapping[str, float]) -> dict[str, Tensor]:
    """Masks (True: kept) of the `round(density * n)`, at least one, largest magnitudes of each tensor."""
    return {name: _largest(w.detach().abs(), max(1, round(densities[name] * w.numel()))) for name, w in weights.items()}


def random_scores(shape: Sequence[int], seed: int, step: int, index: int) -> Tensor:
    """Uniform numbers that depend on (seed, step, index) alone, made on the CPU so that every device and process has
    the same.
    """
    word = ((seed * 1_000_003 + step) * 1_000_003 + index) % 2**63
    return torch.rand(tuple(shape), generator=torch.Generator().manual_seed(word))


def cosine_fraction(step: int, end: int, fraction: float) -> float:
    """The share of a layer's weights that is exchanged at `step`: half a cosine from `fraction` at 0 to 0 at `end`."""
    return fraction / 2 * (1 + math.cos(math.pi * min(step, end) / end)) if end > 0 else 0.0


def exchange(weight: Tensor, mask: Tensor, growth: Tensor, fraction: float) -> Tensor:
    """The mask after `fraction` of its kept weights, those of least magnitude, have been dropped and as many places of
    largest `growth` taken in their stead: |gradient| for RigL, random numbers for SET. The number of kept weights
    stays.

    Places that were just dropped may be taken again, as in the paper; those keep their weight. All arguments have the
    weight's shape.
    """
    mask = mask.bool()
    kept = int(mask.sum())
    moved = min(int(fraction * kept), mask.numel() - kept)
    if moved == 0:
        return mask.clone()
    stays = _largest(weight.detach().abs().float().masked_fill(~mask, -1.0), kept - moved)
    return stays | _largest(growth.detach().float().masked_fill(stays, -math.inf), moved)


def _largest(scores: Tensor, count: int) -> Tensor:
    """True for exactly `count` of the largest scores; of equal ones the first are taken."""
    chosen = torch.zeros(scores.numel(), dtype=torch.bool, device=scores.device)
    if count > 0:
        flat = scores.flatten()
        threshold = flat.kthvalue(flat.numel() - count + 1).values
        above = flat > threshold
        chosen[above] = True
        chosen[(flat == threshold).nonzero().flatten()[: count - int(above.sum())]] = True
    return chosen.view(scores.shape)
