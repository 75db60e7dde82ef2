"""Shapes and batches for runtimes that need the largest batch in advance."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lathe.errors import UserError
from lathe.export.inputs import dynamic_axes, takes_any_size

Array = np.ndarray[Any, Any]


def check_bounds(net: nn.Module, target: str) -> None:
    """Raise UserError if the net takes images of any size."""
    if takes_any_size(net):
        raise UserError(
            f"target.input_size=any: target={target} has to know the largest picture beforehand; give "
            "target.input_size=[height, width]."
        )


def largest(example: Tensor, max_batch_size: int) -> Tensor:
    """Return zeros of the largest input."""
    return torch.zeros(
        max_batch_size, *example.shape[1:], dtype=torch.float32 if example.is_floating_point() else example.dtype
    )


def bounded_axes(net: nn.Module, given: Tensor) -> tuple[dict[int, Any]]:
    """Return `dynamic_axes` with the sizes of `given` as maxima; an axis of size one is fixed."""
    (axes,) = dynamic_axes(net, given)
    names = {0: "batch", 1: "time"}
    return (
        {axis: torch.export.Dim(names[axis], min=1, max=given.shape[axis]) for axis in axes if given.shape[axis] > 1},
    )


def in_parts(run: Callable[[Array], Array], x: Array, largest: int) -> Array:
    """Run at most `largest` samples at a time; a sample's output does not depend on the rest of the batch."""
    if len(x) <= largest:
        return run(x)
    return np.concatenate([run(x[start : start + largest]) for start in range(0, len(x), largest)])
