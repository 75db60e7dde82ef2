"""Example inputs for tracers, their dynamic axes, and batches for runtimes with a largest one."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lathe.errors import require
from lathe.export import Array
from lathe.export.preprocess import ANY, Shipped


def stand_in(example: Tensor, batch: int = 2) -> Tensor:
    """Return zeros of the example's shape with a batch of two; tracers make a batch of one constant."""
    dtype = torch.float32 if example.is_floating_point() else example.dtype
    return torch.zeros(batch, *example.shape[1:], dtype=dtype)


def has_tokens(example: Tensor) -> bool:
    """Return whether an input is token ids `[batch, time]`."""
    return not example.is_floating_point() and example.dim() == 2


def takes_any_size(net: nn.Module) -> bool:
    """Return whether the net scales images of any size to its own."""
    return isinstance(net, Shipped) and net.preprocess.input_size == ANY


@torch.no_grad()
def takes_any_time(net: nn.Module, length: int) -> bool:
    """Return whether a net of token ids takes fewer than `length` of them."""
    try:
        net(torch.zeros(2, max(1, length // 2), dtype=torch.int64))
    except (RuntimeError, ValueError, AssertionError, IndexError):  # the errors of layers with fixed sizes
        return False
    return length > 1


def dynamic_axes(net: nn.Module, example: Tensor) -> tuple[dict[int, Any]]:
    """Return the dynamic axes: batch, time of token ids if the net allows it, and free sides of images."""
    axes: dict[int, Any] = {0: torch.export.Dim("batch", min=1)}
    if has_tokens(example):
        if takes_any_time(net, example.shape[1]):
            axes[1] = torch.export.Dim.AUTO
    elif takes_any_size(net):
        axes |= {2: torch.export.Dim("height", min=1), 3: torch.export.Dim("width", min=1)}
    return (axes,)


def bounded_axes(net: nn.Module, largest: Tensor) -> tuple[dict[int, Any]]:
    """Return `dynamic_axes` with the sizes of `largest` as maxima; an axis of size one is fixed."""
    (axes,) = dynamic_axes(net, largest)
    names = {0: "batch", 1: "time"}
    sides = {axis: largest.shape[axis] for axis in axes if largest.shape[axis] > 1}
    return ({axis: torch.export.Dim(names[axis], min=1, max=side) for axis, side in sides.items()},)


def check_bounds(net: nn.Module, target: str) -> None:
    """Raise UserError if the net takes images of any size."""
    message = f"target.input_size=any: target={target} needs a largest picture; give [height, width]."
    require(not takes_any_size(net), message)


def in_parts(run: Callable[[Array], Array], x: Array, largest: int) -> Array:
    """Run at most `largest` samples at a time; a sample's output does not depend on the rest of the batch."""
    if len(x) <= largest:
        return run(x)
    return np.concatenate([run(x[start : start + largest]) for start in range(0, len(x), largest)])
