"""Layers of a net that read the same tensor, found in one forward pass."""

from collections.abc import Hashable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from lathe.compression.modes import evaluated

Slot = tuple[str, str]  # a layer's name and its input: input_quantizer, or other_quantizer for the second


class Trace:
    """Results of one forward pass; `ranges` are extremes of each layer input, of shape [1], with zero."""

    def __init__(self) -> None:
        self.ranges: dict[Slot, tuple[Tensor, Tensor]] = {}
        self._calls: set[str] = set()
        self._parents: dict[Hashable, Hashable] = {}
        self._kept: list[Tensor] = []  # a freed tensor's id could be used again

    def called(self, name: str) -> bool:
        """Return whether the forward pass called the layer."""
        return name in self._calls

    def group(self, slot: Slot) -> Hashable:
        """Return a key that is equal for inputs of the same tensor, and for all calls of a layer."""
        return self._root(slot)

    def see(self, name: str, inputs: Iterable[Any]) -> None:
        """Record a call of a layer with these positional inputs."""
        self._calls.add(name)
        for role, x in zip(("input_quantizer", "other_quantizer"), inputs, strict=False):
            if not isinstance(x, Tensor) or not x.is_floating_point():
                continue
            slot = (name, role)
            self._kept.append(x)
            self._parents[self._root(slot)] = self._root((id(x), x._version))  # an in-place ReLU changes the version
            low, high = torch.aminmax(x.detach().float())
            old = self.ranges.get(slot, (torch.zeros(1), torch.zeros(1)))
            self.ranges[slot] = torch.minimum(old[0], low.cpu().view(1)), torch.maximum(old[1], high.cpu().view(1))

    def _root(self, item: Hashable) -> Hashable:
        while item in self._parents and self._parents[item] != item:
            item = self._parents[item]
        return item


def uncompiled(net: nn.Module) -> AbstractContextManager[Any]:
    """Run a compiled net as written within the context: hooks run, and other shapes do not recompile."""
    # set_stance imports the compiler, which takes seconds
    compiled = any(module._compiled_call_impl is not None for module in net.modules())
    return torch.compiler.set_stance("force_eager") if compiled else nullcontext()


def tensors_read(net: nn.Module, example: Any, layers: dict[str, nn.Module]) -> Trace:
    """Run `net(example)` once, uncompiled, in eval mode and without gradients; modes are restored."""
    trace = Trace()
    handles = []
    for name, layer in layers.items():

        def hook(module: nn.Module, args: tuple[Any, ...], name: str = name) -> None:
            trace.see(name, args)

        handles.append(layer.register_forward_pre_hook(hook))
    with evaluated(net, handles), torch.no_grad(), uncompiled(net):
        net(example)
    return trace
