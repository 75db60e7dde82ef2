"""Example inputs for tracers, and the axes that are dynamic."""

from typing import Any

import torch
from torch import Tensor, nn

from lathe.export.preprocess import ANY, Shipped


def stand_in(example: Tensor) -> Tensor:
    """Return zeros of the example's shape with a batch of two; tracers make a batch of one constant."""
    return torch.zeros(2, *example.shape[1:], dtype=torch.float32 if example.is_floating_point() else example.dtype)


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
    if not example.is_floating_point() and example.dim() == 2:
        if takes_any_time(net, example.shape[1]):
            axes[1] = torch.export.Dim.AUTO
    elif takes_any_size(net):
        axes |= {2: torch.export.Dim("height", min=1), 3: torch.export.Dim("width", min=1)}
    return (axes,)
