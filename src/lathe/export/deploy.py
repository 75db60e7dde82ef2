"""Converts a quantized net for tracing: integer weights, constant ranges, BatchNorm folded."""

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lathe.compression.quantization.fake_quant import TINY, FakeQuantize
from lathe.compression.quantization.layers import QuantAdd
from lathe.compression.quantization.net import integer_weight, quantized_layers, strip
from lathe.errors import UserError
from lathe.export.dialects import Affine, Dialect
from lathe.export.fold import factors, norms_after

# The bias and the sum of products share 32 bits: this leaves as much for the sum.
LARGEST_BIAS = 2.0**30
SMALLEST_SCALE = 1e-20
DYNAMIC = "dynamic"


class _Integers(nn.Module):
    """Base of the integer layers. `_convert` makes them from quantized layers by assigning the class."""

    dialect: Dialect
    source: Affine | str | None  # range of the input, "dynamic", or None for float
    integers: Tensor
    scale: Tensor
    offset: Tensor | None  # the bias: float32, or int32 in units of offset_scale
    offset_scale: Tensor | None

    def read(self, x: Tensor) -> Tensor:
        return _read(x, self.source, self.dialect)

    full: tuple[int, ...]  # shape of the weight

    @property
    def weights(self) -> Tensor:
        weight = self.dialect.dequantized(self.integers, self.scale)
        return weight if self.integers.shape == self.full else weight.view(self.full)

    @property
    def offsets(self) -> Tensor | None:
        if self.offset is None or self.offset_scale is None:
            return self.offset
        return self.dialect.dequantized(self.offset, self.offset_scale)


class IntegerConv2d(_Integers, nn.Conv2d):
    """A convolution with integer weights."""

    def forward(self, x: Tensor) -> Tensor:
        if self.full[1] > self.in_channels // self.groups:  # a channel of zeros was added
            x = F.pad(x, (0, 0, 0, 0, 0, 1))
        return self._conv_forward(self.read(x), self.weights, self.offsets)


class IntegerLinear(_Integers, nn.Linear):
    """A linear layer with integer weights."""

    def forward(self, x: Tensor) -> Tensor:
        if self.source == DYNAMIC:
            return self.dialect.dynamic_linear(x, self.integers, self.scale, self.offset)
        return self.dialect.linear(self.read(x), self.weights, self.offsets)


class IntegerEmbedding(_Integers, nn.Embedding):
    """An embedding with integer weights; only the rows that are looked up become floats."""

    def forward(self, x: Tensor) -> Tensor:
        rows = F.embedding(x, self.integers).float()
        if self.scale.dim() == 2:
            return (rows.unflatten(-1, (self.scale.shape[1], -1)) * F.embedding(x, self.scale).unsqueeze(-1)).flatten(
                -2
            )
        return rows * F.embedding(x, self.scale.unsqueeze(1))


KINDS: dict[type[nn.Module], type[nn.Module]] = {
    nn.Conv2d: IntegerConv2d,
    nn.Linear: IntegerLinear,
    nn.Embedding: IntegerEmbedding,
}


class IntegerAdd(nn.Module):
    """A sum of two quantized tensors."""

    dialect: Dialect
    first: Affine | str | None
    second: Affine | str | None

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return _read(x, self.first, self.dialect) + _read(y, self.second, self.dialect)


def _read(x: Tensor, source: Affine | str | None, dialect: Dialect) -> Tensor:
    if isinstance(source, Affine):
        return dialect.rounded(x, source)
    return x if source is None else dialect.rounded_dynamically(x)


def is_quantized(net: nn.Module) -> bool:
    """Return whether `net` has layers that can be exported as integers."""
    return bool(quantized_layers(net))


def deployable(net: nn.Module, example: Tensor, dialect: Dialect) -> nn.Module:
    """Return a copy of `net` for tracing, with its quantized layers written in `dialect`.

    The copy is in eval mode on the CPU. ONNX's operators compute nothing in torch, so it can't be run. Signs of folded
    BatchNorms go into the integers, their magnitudes into the scales.
    """
    names = list(quantized_layers(net))
    if not names:
        raise UserError(
            "the net has no quantized layer: train it with compression=qat, or run scripts/compress.py with "
            "compression=ptq_static, and export that run."
        )
    found = copied(net)
    norms = norms_after(copied(net, floats=True), example)
    twins: dict[int, Any] = {}  # by the id of the weight, which layers may share, such as a tied head
    for name in names:
        layer: Any = found.get_submodule(name)
        if isinstance(layer, QuantAdd):
            sources = [_source(layer.input_quantizer, name), _source(layer.other_quantizer, name)]
            layer.__class__ = IntegerAdd  # type: ignore[assignment]  # hooks and name stay
            del layer._modules["input_quantizer"], layer._modules["other_quantizer"]
            layer.__dict__.update(first=sources[0], second=sources[1], dialect=dialect)
            continue
        weight, norm = id(layer.weight), norms.get(name)
        _convert(name, layer, dialect, found.get_submodule(norm) if norm else None)
        if norm:
            found.set_submodule(norm, nn.Identity().eval())
        twin = twins.setdefault(weight, layer)
        if torch.equal(twin.integers, layer.integers) and torch.equal(twin.scale, layer.scale):
            layer.integers, layer.scale = twin.integers, twin.scale
    return found


def copied(net: nn.Module, *, floats: bool = False) -> nn.Module:
    """Return a float32 copy in eval mode on the CPU without gradients; `floats` replaces quantized layers."""
    found = strip(net) if floats else copy.deepcopy(net)
    return found.cpu().float().eval().requires_grad_(False)


def _source(quantizer: FakeQuantize | None, name: str) -> Affine | str | None:
    """Return how a layer quantizes its input: a range, "dynamic", or None."""
    if quantizer is None:
        return None
    if not quantizer.is_enabled:
        raise UserError(
            f"{name} is not rounded yet: finish the run, or calibrate the net, before it is exported as integers."
        )
    if quantizer.follows:
        if quantizer.bits != 8:
            raise UserError(
                f"{name} has {quantizer.bits} bits for dynamic ranges, which no back end has: take 8, or static ranges."
            )
        return DYNAMIC
    scale = quantizer.scale.detach().float().clamp_min(TINY)
    return Affine(float(scale), int(quantizer.zero_point.round()), quantizer.high)


def _convert(name: str, layer: Any, dialect: Dialect, norm: nn.Module | None) -> None:
    """Convert a quantized layer to an integer layer in place."""
    source = _source(getattr(layer, "input_quantizer", None), name)
    if layer.weight_quantizer is None or not layer.weight_quantizer.is_enabled:
        raise UserError(
            f"{name} is not rounded yet: finish the run, or calibrate the net, before it is exported as integers."
        )
    integers, scale = integer_weight(layer)
    full, out = tuple(integers.shape), integers.shape[0]
    scale = scale.double().clamp_min(TINY)
    scale = scale.expand(out).clone() if scale.dim() == 1 else scale.clone()
    bias = None if getattr(layer, "bias", None) is None else layer.bias.detach().double()
    if norm is not None:
        g, b = factors(norm, out)
        bias = b if bias is None else g * bias + b
        scale = scale * g.abs().view(-1, *[1] * (scale.dim() - 1))
        integers = torch.where((g < 0).view(-1, *[1] * (len(full) - 1)), -integers, integers)
    scale = scale.clamp_min(SMALLEST_SCALE)
    offset_scale = None
    if bias is not None and isinstance(source, Affine) and dialect.integer_bias and scale.dim() == 1:
        finer = (
            127 // layer.weight_quantizer.high
        )  # store whole multiples of integers with few bits: the bias is rounded to units of the scale
        integers, scale = integers * finer, scale / finer
        integers, scale = _widened(integers, scale, bias.abs() / (source.scale * LARGEST_BIAS))
        offset_scale = scale * source.scale
        bias = torch.round(bias / offset_scale).to(torch.int32)
    elif bias is not None:
        bias = bias.float()
    if (
        not dialect.one_channel
        and isinstance(layer, nn.Conv2d)
        and layer.in_channels == 1
        and source is not None
        and scale.dim() == 1
    ):
        integers = F.pad(integers, (0, 0, 0, 0, 0, 1))
        full = tuple(integers.shape)
    if scale.dim() == 2:  # groups lie along the flattened input
        integers = integers.flatten(1)
    layer._parameters.update(weight=None, bias=None)
    layer._modules.clear()
    kind = next(kind for plain, kind in KINDS.items() if isinstance(layer, plain))
    layer.__class__ = kind  # hooks and name stay
    layer.__dict__.update(source=source, dialect=dialect, full=full)
    layer.register_buffer("integers", integers)
    layer.register_buffer("scale", scale.float())
    layer.register_buffer("offset", bias)
    layer.register_buffer("offset_scale", None if offset_scale is None else offset_scale.float())


def _widened(integers: Tensor, scale: Tensor, least: Tensor) -> tuple[Tensor, Tensor]:
    """Raise scales to `least`, so that the bias fits into 32 bits, and round the integers to match.

    This affects channels with weights that are negligible compared with their bias. If all integers are zero, as in a
    pruned channel, only the scale changes.
    """
    wide = torch.maximum(scale, least)
    ratio = (scale / wide).view(-1, *[1] * (integers.dim() - 1))
    return torch.where(ratio < 1, torch.round(integers * ratio), integers).to(torch.int8), wide
