"""Layers that round their input and weights, made by a change of class, and which layers of a net become so."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal, cast

import torch.nn.functional as F
from torch import Tensor, nn

from lathe.compression.pruning.masks import weights_of
from lathe.compression.quantization.fake_quant import FakeQuantize
from lathe.config.types import Bits, Count
from lathe.config.validation import validated
from lathe.errors import ArgumentError, UserError, did_you_mean


class QuantConv2d(nn.Conv2d):
    """`nn.Conv2d` with a `weight_quantizer` and an `input_quantizer`; None is float."""

    weight_quantizer: FakeQuantize | None
    input_quantizer: FakeQuantize | None

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.input_quantizer is None else self.input_quantizer(x)
        weight = self.weight if self.weight_quantizer is None else self.weight_quantizer(self.weight)
        return self._conv_forward(x, weight, self.bias)


class QuantLinear(nn.Linear):
    """`nn.Linear` with a `weight_quantizer` and an `input_quantizer`; None is float."""

    weight_quantizer: FakeQuantize | None
    input_quantizer: FakeQuantize | None

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.input_quantizer is None else self.input_quantizer(x)
        weight = self.weight if self.weight_quantizer is None else self.weight_quantizer(self.weight)
        return F.linear(x, weight, self.bias)


class QuantEmbedding(nn.Embedding):
    """`nn.Embedding` with a `weight_quantizer`, whose channels are rows."""

    weight_quantizer: FakeQuantize | None

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight if self.weight_quantizer is None else self.weight_quantizer(self.weight)
        return F.embedding(
            x, weight, self.padding_idx, self.max_norm, self.norm_type, self.scale_grad_by_freq, self.sparse
        )


class QuantAdd(nn.Module):
    """Sum of two tensors rounded by `input_quantizer` and `other_quantizer`; made of a class named `Add`."""

    input_quantizer: FakeQuantize
    other_quantizer: FakeQuantize

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return cast(Tensor, self.input_quantizer(x) + self.other_quantizer(y))


Weighted = QuantConv2d | QuantLinear | QuantEmbedding
QuantLayer = Weighted | QuantAdd
WEIGHTED = {nn.Conv2d: QuantConv2d, nn.Linear: QuantLinear, nn.Embedding: QuantEmbedding}


def quantized_class(module: nn.Module) -> type[nn.Module] | None:
    """Return the class that quantizes `module`; None for others and for subclasses, which may differ."""
    kind = type(module)
    if kind in WEIGHTED:
        return WEIGHTED[kind]
    is_add = kind.__name__ == "Add" and not list(module.children()) and not list(module.parameters())
    return QuantAdd if is_add else None


def roles_of(module: nn.Module) -> tuple[str, ...]:
    """Return the quantizers that a layer has, or will have once quantized."""
    kind = quantized_class(module) or type(module)
    if issubclass(kind, QuantAdd):
        return ("input_quantizer", "other_quantizer")
    return ("weight_quantizer",) if issubclass(kind, QuantEmbedding) else ("weight_quantizer", "input_quantizer")


def to_quantized(module: nn.Module) -> None:
    """Change the class of a plain layer; quantizers are None until set."""
    kind = quantized_class(module)
    assert kind is not None
    module.__dict__["_plain_class"] = type(module)
    module.__class__ = kind  # parameters, hooks and names stay; a wrapper would rename them
    for role in roles_of(module):
        module.register_module(role, None)


def to_plain(module: nn.Module) -> None:
    """Undo `to_quantized`."""
    for role in roles_of(module):
        del module._modules[role]
    module.__dict__.pop("plan", None)
    module.__class__ = module.__dict__.pop("_plain_class")  # as before `to_quantized`


def quantized_layers(net: nn.Module) -> dict[str, nn.Module]:
    """Return the quantized layers and residual sums of `net`, by name."""
    return {name: module for name, module in net.named_modules() if isinstance(module, QuantLayer)}


def weighted(net: nn.Module) -> dict[str, Weighted]:
    """Return the quantized layers that have a weight, by name."""
    return {name: module for name, module in net.named_modules() if isinstance(module, Weighted)}


def quantizers(net: nn.Module) -> list[FakeQuantize]:
    """Return every quantizer of `net` once, in order."""
    return [module for module in net.modules() if isinstance(module, FakeQuantize)]


def some_quantizers(net: nn.Module) -> list[FakeQuantize]:
    """Return `quantizers(net)`; raise UserError if there are none."""
    found = quantizers(net)
    if not found:
        raise UserError(f"{type(net).__name__} has no quantized layer: quantize it first.")
    return found


@validated
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

    weight_bits: Bits = 8
    activation_bits: Bits | None = 8
    per_channel: bool = True
    lsq: bool = False
    activation: Literal["static", "dynamic", "none"] = "static"
    group_size: Count | None = None

    def __post_init__(self) -> None:
        if self.group_size is not None and self.lsq:
            raise ArgumentError(f"group_size={self.group_size} does not work with lsq=true.")

    @property
    def reads(self) -> str:
        """Return `activation`, or none without `activation_bits`."""
        return "none" if self.activation_bits is None else self.activation

    @property
    def of_weight(self) -> tuple[Any, ...]:
        """Return what layers that share a weight must have in common."""
        return self.weight_bits, self.per_channel, self.lsq, self.group_size


Overrides = Mapping[str, LayerPlan | None]  # by pattern of layer names; None leaves a layer in float


def choose(
    net: nn.Module, default: LayerPlan | None, overrides: Overrides, key: str = "overrides"
) -> dict[str, LayerPlan]:
    """Return the plan of each layer to quantize, by name, in the net's order.

    Raises:
        UserError: a pattern matches no layer that can be quantized.
    """
    kinds = {
        name: quantized_class(module) or type(module)
        for name, module in net.named_modules()
        if isinstance(module, QuantLayer) or quantized_class(module) is not None
    }
    for pattern in overrides:
        if not any(fnmatchcase(name, pattern) for name in kinds):
            hint = did_you_mean(pattern, kinds, f"layers are {', '.join(list(kinds)[:5]) or 'none'}, ...")
            raise UserError(f"{key}: the pattern {pattern!r} matches no layer to quantize; {hint}")
    chosen: dict[str, LayerPlan] = {}
    for name, kind in kinds.items():
        plan = default
        for pattern, other in overrides.items():
            if fnmatchcase(name, pattern):
                plan = other
        if plan is not None and not (kind is QuantAdd and plan.reads != "static"):
            chosen[name] = plan
    return chosen


def left_in_float(net: nn.Module, excluded: Iterable[str] = ()) -> tuple[float, list[str]]:
    """Return the share of weights in float without modules that match `excluded`, and their names by size."""
    rounded = {id(layer.weight) for layer in weighted(net).values() if layer.weight_quantizer is not None}
    left = {name: p.numel() for name, p in weights_of(net, exclude=list(excluded)).items() if id(p) not in rounded}
    share = sum(left.values()) / max(sum(p.numel() for p in weights_of(net).values()), 1)
    return share, sorted(left, key=lambda name: -left[name])


def float_sentence(net: nn.Module, key: str, overrides: Overrides) -> str | None:
    """Return a warning if more than a twentieth of the weights stays in float unasked, else None."""
    share, names = left_in_float(net, [pattern for pattern, plan in overrides.items() if plan is None])
    if share <= 0.05:
        return None
    return (
        f"{key} leaves {share:.1%} of the weights in float, such as {names[0]}: it quantizes plain Conv2d, Linear and "
        "Embedding layers that the net calls. Name others in exclude."
    )
