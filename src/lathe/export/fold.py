"""Finds BatchNorms that can be folded into the layer before them."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode


class _Uses(TorchFunctionMode):
    """Counts the operations that use each tensor, by identity."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[int] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if _tensors(result):  # reading a shape does not use the values
            self.count.update(id(tensor) for tensor in _tensors((args, kwargs)))
        return result


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def norms_after(net: nn.Module, example: Tensor) -> dict[str, str]:
    """Map names of convolutions and linear layers to the only reader of their output, a BatchNorm.

    It runs one forward pass of `example`, so the net must be in eval mode. Layers that are called twice are left out,
    as are norms without running statistics.
    """
    layers: dict[int, str] = {}  # the layer whose output a tensor is
    pairs: dict[str, tuple[str, int]] = {}
    calls: Counter[str] = Counter()
    uses = _Uses()
    kept: list[Any] = []  # keeps the tensors alive, so that ids stay unique

    def layer_hook(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            calls[name] += 1
            kept.append(output)
            layers[id(output)] = name
            uses.count[id(output)] = 0  # earlier counts are of a freed tensor with the same id

        return hook

    def norm_hook(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any) -> None:
            calls[name] += 1
            if id(args[0]) in layers:
                pairs[layers[id(args[0])]] = (name, id(args[0]))

        return hook

    handles = []
    for name, module in net.named_modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            handles.append(module.register_forward_hook(layer_hook(name)))
        elif isinstance(module, _BatchNorm) and module.running_mean is not None:
            handles.append(module.register_forward_pre_hook(norm_hook(name)))
    try:
        with torch.no_grad(), uses:
            kept.append(net(example))
    finally:
        for handle in handles:
            handle.remove()
    returned = {id(tensor) for tensor in _tensors(kept[-1])}
    return {
        layer: norm
        for layer, (norm, tensor) in pairs.items()
        if calls[layer] == calls[norm] == 1 and uses.count[tensor] == 1 and tensor not in returned
    }


def factors(norm: nn.Module, out: int) -> tuple[Tensor, Tensor]:
    """Return (g, b), each `[out]` in float64, such that an eval-mode BatchNorm is `y = g x + b`."""
    assert isinstance(norm, _BatchNorm)
    assert norm.running_mean is not None
    assert norm.running_var is not None
    mean, variance = norm.running_mean.double(), norm.running_var.double()
    weight = torch.ones(out, dtype=torch.float64) if norm.weight is None else norm.weight.detach().double()
    bias = torch.zeros(out, dtype=torch.float64) if norm.bias is None else norm.bias.detach().double()
    g = weight / torch.sqrt(variance + norm.eps)
    return g, bias - g * mean
