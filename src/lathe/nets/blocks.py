"""The repeated units of a net, which strategies shard, cut, compile or recompute; residual sums."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class Add(nn.Module):
    """x + y, of equal shapes, at the end of a residual branch, as a module that quantizers can find."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y


class Blocks(nn.ModuleList):
    """A net's repeated units, run one after the other; their parameters are named `blocks.<i>...`.

    A net with blocks guarantees `forward(x) == leave(blocks(enter(x)))`. With `in_segments`, in training mode with
    gradients, the chain of n blocks is split into about sqrt(n) equal segments, and only their inputs are stored: the
    backward pass runs each segment again (Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost",
    arXiv:1604.06174). Blocks that a pipeline has replaced by `nn.Identity` are not counted.
    """

    in_segments: bool = False

    def forward(self, x: Tensor) -> Tensor:
        if not (self.in_segments and self.training and torch.is_grad_enabled()):
            return run(list(self), x)
        from lathe.nets.recompute import run_in_segments  # for trainer.activation_checkpointing=sqrt only

        return run_in_segments(self, x)


def blocks_of(net: nn.Module) -> list[nn.Module]:
    """Return the repeated units in a net's `blocks` (ModuleList, Sequential, list, tuple), if it has any."""
    blocks = getattr(net, "blocks", None)
    if not isinstance(blocks, nn.ModuleList | nn.Sequential | list | tuple):
        return []
    return [block for block in blocks if isinstance(block, nn.Module)]


def run(blocks: Sequence[nn.Module], x: Tensor) -> Tensor:
    """Call each block on the output of the one before, with hooks."""
    for block in blocks:
        x = block(x)
    return x
