"""Lottery tickets: prune what training left small, rewind what survives to its early weights, and train again.

Frankle and Carbin 2019, "The Lottery Ticket Hypothesis", arXiv:1803.03635; rewinding to a step after the first: Frankle
et al. 2020, "Linear Mode Connectivity and the Lottery Ticket Hypothesis", arXiv:1912.05671.
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
    """The share of zeros in each of `rounds` trainings: 0 in the first, `sparsity` in the last, and the same share of
    the surviving weights removed between any two.
    """
    return [1 - (1 - sparsity) ** (k / (rounds - 1)) for k in range(rounds)]


def copy_state(net: nn.Module, whole: Callable[[Tensor], Tensor] = Tensor.detach) -> dict[str, Tensor]:
    """Weights and buffers of `net`, BatchNorm's statistics too, as copies on the CPU that further training does not
    touch. `whole` gives the full tensor where a process holds a part."""
    return {
        name: whole(tensor).detach().to("cpu", copy=True) for name, tensor in net.state_dict(keep_vars=True).items()
    }


def rewind(
    net: nn.Module,
    saved: Mapping[str, Tensor],
    masks: Mapping[str, Tensor] | None = None,
    put: Callable[[Tensor, Tensor], Any] = Tensor.copy_,
) -> None:
    """Puts the weights and buffers that `copy_state` has kept back into `net`, in place, with zeros where `masks` has
    False. `put` writes a full tensor (second) into one of which a process may hold a part (first)."""
    with torch.no_grad():
        for name, tensor in net.state_dict(keep_vars=True).items():
            mask = (masks or {}).get(name)
            put(tensor, saved[name] if mask is None else saved[name] * mask.to(saved[name].device))
