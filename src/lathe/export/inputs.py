"""Which shapes a file takes: what every tracer is given, and which of its axes may differ at each call."""

from typing import Any

import torch
from torch import Tensor, nn

from lathe.export.preprocess import ANY, Shipped


def stand_in(example: Tensor) -> Tensor:
    """Zeros of the example's shape, with a batch of two: tracers take a batch of one for a constant, and keep what they
    are given.
    """
    return torch.zeros(2, *example.shape[1:], dtype=torch.float32 if example.is_floating_point() else example.dtype)


def takes_any_size(net: nn.Module) -> bool:
    """Whether it scales pictures of every size to its own."""
    return isinstance(net, Shipped) and net.preprocess.input_size == ANY


@torch.no_grad()
def takes_any_time(net: nn.Module, length: int) -> bool:
    """Whether a net of token ids takes fewer than `length` of them."""
    try:
        net(torch.zeros(2, max(1, length // 2), dtype=torch.int64))
    except (RuntimeError, ValueError, AssertionError, IndexError):  # what layers of fixed sizes raise
        return False
    return length > 1


def dynamic_axes(net: nn.Module, example: Tensor) -> tuple[dict[int, Any]]:
    """Which axes may differ at each call: the batch, the time of token ids `[batch, time]` as far as the net takes it,
    and the sides of pictures whose size is free."""
    axes: dict[int, Any] = {0: torch.export.Dim("batch", min=1)}
    if not example.is_floating_point() and example.dim() == 2:
        if takes_any_time(net, example.shape[1]):
            axes[1] = torch.export.Dim.AUTO
    elif takes_any_size(net):
        axes |= {2: torch.export.Dim("height", min=1), 3: torch.export.Dim("width", min=1)}
    return (axes,)
