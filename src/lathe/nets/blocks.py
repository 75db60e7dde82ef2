"""The repeated units of a net, which strategies shard, cut, compile or recompute; residual sums."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


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
        for segment in segments(own_blocks(self)):
            x = recomputed(segment, lambda x, segment=segment: run(segment, x), x)
        return x


def blocks_of(net: nn.Module) -> list[nn.Module]:
    """Return the repeated units in a net's `blocks` (ModuleList, Sequential, list, tuple), if it has any."""
    named = getattr(net, "blocks", None)
    if not isinstance(named, nn.ModuleList | nn.Sequential | list | tuple):
        return []
    return [block for block in named if isinstance(block, nn.Module)]


def repeated_children(net: nn.Module) -> list[nn.Module]:
    """Return the largest group of two or more children of one class with children of their own, as a transformer's
    layers in a ModuleList; empty without one.
    """
    families = [list(module.children()) for module in net.modules()]
    alike = [family for family in families if len({type(one) for one in family}) == 1 < len(family)]
    deep = [family for family in alike if any(True for _ in family[0].children())]
    return max(deep, key=lambda family: sum(p.numel() for one in family for p in one.parameters()), default=[])


def own_blocks(blocks: Sequence[nn.Module] | nn.ModuleList) -> list[nn.Module]:
    """Return the blocks that compute; a pipeline replaces those of other ranks by `nn.Identity`."""
    return [block for block in blocks if not isinstance(block, nn.Identity)]


def segments(blocks: Sequence[nn.Module]) -> list[list[nn.Module]]:
    """Cut n blocks into round(sqrt(n)) consecutive segments whose lengths differ by at most one."""
    count = round(len(blocks) ** 0.5)
    edges = [index * len(blocks) // count for index in range(count + 1)] if count else []
    return [list(blocks[start:end]) for start, end in pairwise(edges)]


def run(blocks: Sequence[nn.Module], x: Tensor) -> Tensor:
    """Call each block on the output of the one before, with hooks."""
    for block in blocks:
        x = block(x)
    return x


def recomputed(blocks: Sequence[nn.Module], function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return `function(*args, **kwargs)` without storing activations: the backward pass calls it again.

    The first argument is copied for each call, because a block may write into it. The second call uses the random
    numbers, autocast and buffers of `blocks` of the first: otherwise a BatchNorm would count each batch twice.
    """

    def copied(x: Any, *rest: Any, **kwargs: Any) -> Any:
        return function(x.clone() if isinstance(x, Tensor) else x, *rest, **kwargs)

    if torch.compiler.is_compiling() or not any(True for block in blocks for _ in block.buffers()):
        # a compiler recomputes within its graph, which has the update of a buffer once
        return checkpoint(copied, *args, use_reentrant=False, **kwargs)

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), _BuffersOf(blocks)

    return checkpoint(copied, *args, use_reentrant=False, context_fn=contexts, **kwargs)


class _BuffersOf(AbstractContextManager[None]):
    """In this context, modules use copies of their buffers as of construction; afterwards their own again."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        modules = dict.fromkeys(module for block in blocks for module in block.modules())
        self.was = [
            (module, name, buffer.detach().clone())
            for module in modules
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        self.own: list[tuple[nn.Module, str, Tensor | None]] = []

    def __enter__(self) -> None:
        self.own = [(module, name, module._buffers[name]) for module, name, _ in self.was]
        for module, name, buffer in self.was:
            module._buffers[name] = buffer.clone()  # a graph with retain_graph may be recomputed again

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for module, name, buffer in self.own:
            module._buffers[name] = buffer
