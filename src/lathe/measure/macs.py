"""Multiply-accumulates of a forward pass: as they are computed, and as they would be if zero weights cost nothing."""

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
        """MACs with a weight that is not zero. No common hardware leaves the others out where the zeros lie
        anywhere.
        """
        return round(self.dense * self.density)


@dataclass(frozen=True)
class Macs:
    """`dense` counts every product; `effective` those with non-zero weights. `layers` are the modules with a weight, in
    the order in which they ran; what is in no layer (attention's products of activations) counts whole in both."""

    dense: int
    effective: int
    layers: dict[str, LayerMacs]


class _Meter:
    """Adds up what runs between the start and the end of one module."""

    def __init__(self, counter: FlopCounterMode) -> None:
        self.counter, self.flops, self.begun = counter, 0, [0]

    def start(self, module: nn.Module, args: object) -> None:
        self.begun.append(self.counter.get_total_flops())

    def stop(self, module: nn.Module, args: object, output: object) -> None:
        self.flops += self.counter.get_total_flops() - self.begun.pop()


def count_macs(net: nn.Module, example: Tensor) -> Macs:
    """MACs of one forward pass on `example`, for the whole batch that it is: matrix products, convolutions and
    attention, as `count_flops` counts them; biases, norms and activations are left out.

    Modes, gradients and the random state of `net` are left as found.
    """
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
    """The matrix or kernel that a module multiplies by; norms have none."""
    weight = module._parameters.get("weight")
    return weight if weight is not None and weight.dim() >= 2 else None


def _density(module: nn.Module) -> float:
    weight = _weight(module)
    assert weight is not None
    return int(weight.detach().count_nonzero()) / weight.numel() if weight.numel() else 1.0
