"""Layers that round their input and weights, made by a change of class: parameters keep their names."""

from typing import cast

import torch.nn.functional as F
from torch import Tensor, nn

from lathe.compression.quantization.fake_quant import FakeQuantize
from lathe.errors import UserError


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


QuantLayer = QuantConv2d | QuantLinear | QuantEmbedding | QuantAdd
ROLES = ("weight_quantizer", "input_quantizer", "other_quantizer")
WEIGHTED = {nn.Conv2d: QuantConv2d, nn.Linear: QuantLinear, nn.Embedding: QuantEmbedding}


def quantized_class(module: nn.Module) -> type[nn.Module] | None:
    """Return the class that quantizes `module`; None for others and for subclasses, which may differ."""
    kind = type(module)
    if kind in WEIGHTED:
        return WEIGHTED[kind]
    return (
        QuantAdd if kind.__name__ == "Add" and not list(module.children()) and not list(module.parameters()) else None
    )


def to_quantized(module: nn.Module) -> None:
    """Change the class of a plain layer; quantizers are None until set."""
    kind = quantized_class(module)
    assert kind is not None
    if kind is QuantAdd:
        module.__dict__["_plain_class"] = type(module)
    module.__class__ = kind  # parameters, hooks and names stay; a wrapper would rename them
    for role in roles_of(module):
        module.register_module(role, None)


def to_plain(module: nn.Module) -> None:
    """Undo `to_quantized`."""
    for role in roles_of(module):
        del module._modules[role]
    module.__dict__.pop("plan", None)
    own = module.__dict__.pop("_plain_class", None)
    kind = own or next(plain for plain, quantized in WEIGHTED.items() if isinstance(module, quantized))
    module.__class__ = kind  # as in to_quantized


def roles_of(module: nn.Module) -> tuple[str, ...]:
    """Return the quantizers that a layer has, or will have once quantized."""
    kind = quantized_class(module) or type(module)
    if issubclass(kind, QuantAdd):
        return ROLES[1:]
    return ROLES[:1] if issubclass(kind, QuantEmbedding) else ROLES[:2]


def quantized_layers(net: nn.Module) -> dict[str, nn.Module]:
    """Return the quantized layers and residual sums of `net`, by name."""
    return {name: module for name, module in net.named_modules() if isinstance(module, QuantLayer)}


def quantizers(net: nn.Module) -> list[FakeQuantize]:
    """Return every quantizer of `net` once, in order."""
    return [module for module in net.modules() if isinstance(module, FakeQuantize)]


def weighted(net: nn.Module) -> dict[str, QuantConv2d | QuantLinear | QuantEmbedding]:
    """Return the quantized layers that have a weight, by name."""
    return {
        name: module
        for name, module in net.named_modules()
        if isinstance(module, QuantConv2d | QuantLinear | QuantEmbedding)
    }


def some_quantizers(net: nn.Module) -> list[FakeQuantize]:
    """Return `quantizers(net)`; raise UserError if there are none."""
    found = quantizers(net)
    if not found:
        raise UserError(f"{type(net).__name__} has no quantized layer: quantize it first.")
    return found
