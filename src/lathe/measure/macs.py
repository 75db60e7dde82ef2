"""Multiply-accumulates (MACs) of a forward pass, in total and with non-zero weights only."""

from dataclasses import dataclass

from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from lathe.measure.flops import ATTENTION, run_counted


@dataclass(frozen=True)
class LayerMacs:
    """`dense` is what the layer computes; `density` the share of its weights that are not zero."""

    dense: int
    density: float

    @property
    def effective(self) -> int:
        """Return the MACs whose weight is not zero. Common hardware does not skip unstructured zeros."""
        return round(self.dense * self.density)


@dataclass(frozen=True)
class Macs:
    """MACs of all products, and of those with non-zero weights; products outside `layers` count in both."""

    dense: int
    effective: int
    layers: dict[str, LayerMacs]


class _Meter:
    """Adds up the FLOPs between the start and the end of one module."""

    def __init__(self, counter: FlopCounterMode) -> None:
        self.counter, self.flops, self.begun = counter, 0, [0]

    def start(self, module: nn.Module, args: object) -> None:
        self.begun.append(self.counter.get_total_flops())

    def stop(self, module: nn.Module, args: object, output: object) -> None:
        self.flops += self.counter.get_total_flops() - self.begun.pop()


def count_macs(net: nn.Module, example: Tensor) -> Macs:
    """Return the MACs of one forward pass on the batch `example`, counted as in `count_flops`."""
    layers = {name: module for name, module in net.named_modules() if _weight(module) is not None}
    counter = FlopCounterMode(display=False, custom_mapping=ATTENTION)
    meters = {name: _Meter(counter) for name in layers}
    handles = []
    for name, module in layers.items():
        handles += [
            module.register_forward_pre_hook(meters[name].start),
            module.register_forward_hook(meters[name].stop),
        ]
    total = run_counted(net, example, counter, handles) // 2
    found = {
        name: LayerMacs(meters[name].flops // 2, _density(module))
        for name, module in layers.items()
        if meters[name].flops
    }
    saved = sum(layer.dense - layer.effective for layer in found.values())
    return Macs(dense=total, effective=total - saved, layers=found)


def _weight(module: nn.Module) -> Tensor | None:
    """Return the matrix or kernel that a module multiplies by; None for norms."""
    weight = module._parameters.get("weight")
    return weight if weight is not None and weight.dim() >= 2 else None


def _density(module: nn.Module) -> float:
    weight = _weight(module)
    assert weight is not None
    return int(weight.detach().count_nonzero()) / weight.numel() if weight.numel() else 1.0
