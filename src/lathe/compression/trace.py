"""Which layers of a net read the same tensor, seen in one forward pass."""

from collections.abc import Hashable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from lathe.compression.modes import evaluated

Slot = tuple[str, str]  # a layer's name, and which of its inputs: input_quantizer, or other_quantizer for the second


class Trace:
    """What one forward pass has shown.

    Attributes:
        ranges: smallest and largest value of each input that a layer read, of shape [1], zero included.
    """

    def __init__(self) -> None:
        self.ranges: dict[Slot, tuple[Tensor, Tensor]] = {}
        self._calls: set[str] = set()
        self._parents: dict[Hashable, Hashable] = {}
        self._kept: list[Tensor] = []  # a tensor that is freed would give its identity to another

    def called(self, name: str) -> bool:
        """Whether the forward pass called the layer."""
        return name in self._calls

    def group(self, slot: Slot) -> Hashable:
        """Equal for inputs that are the same tensor, and for those of a layer that is called several times."""
        return self._root(slot)

    def see(self, name: str, inputs: Iterable[Any]) -> None:
        """Notes a call of a layer with these positional inputs."""
        self._calls.add(name)
        for role, x in zip(("input_quantizer", "other_quantizer"), inputs, strict=False):
            if not isinstance(x, Tensor) or not x.is_floating_point():
                continue
            slot = (name, role)
            self._kept.append(x)
            self._parents[self._root(slot)] = self._root(
                (id(x), x._version)
            )  # the version tells what an in-place ReLU changes
            low, high = torch.aminmax(x.detach().float())
            old = self.ranges.get(slot, (torch.zeros(1), torch.zeros(1)))
            self.ranges[slot] = torch.minimum(old[0], low.cpu().view(1)), torch.maximum(old[1], high.cpu().view(1))

    def _root(self, item: Hashable) -> Hashable:
        while item in self._parents and self._parents[item] != item:
            item = self._parents[item]
        return item


def uncompiled(net: nn.Module) -> AbstractContextManager[Any]:
    """Within it, a net that is compiled runs as written: hooks are called, and nothing is compiled for a batch of
    another size.
    """
    # set_stance imports the compiler, which takes seconds
    compiled = any(module._compiled_call_impl is not None for module in net.modules())
    return torch.compiler.set_stance("force_eager") if compiled else nullcontext()


def tensors_read(net: nn.Module, example: Any, layers: dict[str, nn.Module]) -> Trace:
    """Runs `net(example)` once, uncompiled, in evaluation mode and without gradients, and leaves its modes as they
    were.
    """
    trace = Trace()
    handles = []
    for name, layer in layers.items():

        def hook(module: nn.Module, args: tuple[Any, ...], name: str = name) -> None:
            trace.see(name, args)

        handles.append(layer.register_forward_pre_hook(hook))
    with evaluated(net, handles), torch.no_grad(), uncompiled(net):
        net(example)
    return trace
