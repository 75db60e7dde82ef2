"""Lottery tickets: prune the smallest trained weights, rewind the others, and train again.

Frankle and Carbin 2019, "The Lottery Ticket Hypothesis", arXiv:1803.03635; rewinding to a later step: Frankle et al.
2020, "Linear Mode Connectivity and the Lottery Ticket Hypothesis", arXiv:1912.05671.
"""

from collections.abc import Callable, Mapping
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor, nn

from lathe.config.types import OpenShare
from lathe.config.validation import validated


@validated
def round_sparsities(sparsity: OpenShare, rounds: Annotated[int, Field(ge=2)]) -> list[float]:
    """Return the share of zeros in each of `rounds` trainings: from 0 to `sparsity`, geometrically."""
    return [1 - (1 - sparsity) ** (k / (rounds - 1)) for k in range(rounds)]


def copy_state(net: nn.Module, whole: Callable[[Tensor], Tensor] = Tensor.detach) -> dict[str, Tensor]:
    """Copy weights and buffers of `net` to the CPU; `whole` returns the full tensor of a shard."""
    return {
        name: whole(tensor).detach().to("cpu", copy=True) for name, tensor in net.state_dict(keep_vars=True).items()
    }


def rewind(
    net: nn.Module,
    saved: Mapping[str, Tensor],
    masks: Mapping[str, Tensor] | None = None,
    put: Callable[[Tensor, Tensor], Any] = Tensor.copy_,
) -> None:
    """Load what `copy_state` returned into `net`, in place, with zeros where `masks` are False.

    `put(tensor, value)` copies a full value into a tensor that may be sharded.
    """
    with torch.no_grad():
        for name, tensor in net.state_dict(keep_vars=True).items():
            mask = (masks or {}).get(name)
            put(tensor, saved[name] if mask is None else saved[name] * mask.to(saved[name].device))
