"""Selection of a net's layers to quantize, and their settings."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from lathe.compression.masks.parameters import weights_of
from lathe.compression.quantization.layers import QuantAdd, QuantLayer, quantized_class, weighted
from lathe.errors import UserError, did_you_mean

ACTIVATIONS = ("static", "dynamic", "none")


@dataclass(frozen=True)
class LayerPlan:
    """Quantization settings of one layer.

    Attributes:
        weight_bits: 2 to 8.
        activation_bits: 2 to 8; None leaves the layer's input in float.
        per_channel: a scale for each output channel (row of an embedding), else one for the whole weight.
        lsq: scales are trained (learned step size).
        activation: static ranges; dynamic, per tensor; or none.
        group_size: that many weights of an output channel share a scale, if it divides their number; None: all of them.
    """

    weight_bits: int = 8
    activation_bits: int | None = 8
    per_channel: bool = True
    lsq: bool = False
    activation: str = "static"
    group_size: int | None = None

    def __post_init__(self) -> None:
        for key, bits in (("weight_bits", self.weight_bits), ("activation_bits", self.activation_bits)):
            if bits is not None and not (isinstance(bits, int) and 2 <= bits <= 8):
                raise UserError(f"{key}={bits} is no width of an integer here: take 2 to 8.")
        if self.weight_bits is None:
            raise UserError("weight_bits=None quantizes no weight: leave the layer out instead.")
        if self.activation not in ACTIVATIONS:
            raise UserError(f"activation={self.activation!r} is unknown: take {', '.join(ACTIVATIONS)}.")
        if self.group_size is not None and (self.group_size < 1 or self.lsq):
            raise UserError(f"group_size={self.group_size}: give a whole number from 1, without lsq.")

    @property
    def reads(self) -> str:
        """Return `activation`, or none without `activation_bits`."""
        return "none" if self.activation_bits is None else self.activation


def choose(
    net: nn.Module, default: LayerPlan | None, overrides: dict[str, LayerPlan | None], key: str = "overrides"
) -> dict[str, LayerPlan]:
    """Return the plan of each layer to quantize, by name, in the net's order.

    Raises:
        UserError: a pattern matches no layer that can be quantized.
    """
    modules = dict(net.named_modules())
    names = [
        name
        for name, module in modules.items()
        if isinstance(module, QuantLayer) or quantized_class(module) is not None
    ]
    for pattern in overrides:
        if not any(fnmatchcase(name, pattern) for name in names):
            like = f"layers are named like {names[0]}." if names else "it has none."
            hint = did_you_mean(pattern, names, like)
            raise UserError(
                f"{key}: the pattern {pattern!r} matches no layer of {type(net).__name__} that can be quantized; {hint}"
            )
    chosen: dict[str, LayerPlan] = {}
    for name in names:
        plan = default
        for pattern, other in overrides.items():
            if fnmatchcase(name, pattern):
                plan = other
        added = isinstance(modules[name], QuantAdd) or quantized_class(modules[name]) is QuantAdd
        if plan is not None and not (added and plan.reads != "static"):
            chosen[name] = plan
    return chosen


def left_in_float(net: nn.Module, excluded: Iterable[str] = ()) -> tuple[float, list[str]]:
    """Return the share of weights in float without modules that match `excluded`, and their names by size."""
    rounded = {id(layer.weight) for layer in weighted(net).values() if layer.weight_quantizer is not None}
    left = {name: p.numel() for name, p in weights_of(net, exclude=list(excluded)).items() if id(p) not in rounded}
    share = sum(left.values()) / max(sum(p.numel() for p in weights_of(net).values()), 1)
    return share, sorted(left, key=lambda name: -left[name])


def float_sentence(net: nn.Module, key: str, overrides: Mapping[str, LayerPlan | None]) -> str | None:
    """Return a warning if more than a twentieth of the weights stays in float unasked, else None."""
    share, names = left_in_float(net, [pattern for pattern, plan in overrides.items() if plan is None])
    if share <= 0.05:
        return None
    return (
        f"{key} leaves {share:.1%} of the weights in float, such as {names[0]}: it takes plain Conv2d, Linear and "
        "Embedding layers that the net calls, not layers of other classes; name those that are to stay so in exclude."
    )
