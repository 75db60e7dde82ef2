"""Convert a quantized net for tracing: integer weights, constant ranges, BatchNorm folded.

`deployable` writes the integer layers in the operators of a back end, its `Dialect`: PT2E's here, ONNX's in
`lathe.export.targets.onnx`.
"""

import copy
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lathe.compression.quantization.fake_quant import TINY, FakeQuantize
from lathe.compression.quantization.net import QuantAdd, integer_weight, quantized_layers, strip
from lathe.compression.quantization.ptq import followers
from lathe.errors import require
from lathe.measure.calls import Call

# The bias and the sum of products share 32 bits: this leaves as much for the sum.
LARGEST_BIAS = 2.0**30
SMALLEST_SCALE = 1e-20
DYNAMIC = "dynamic"
NOT_ROUNDED = "{} is not rounded yet: finish the run, or calibrate the net, before it is exported as integers."


@dataclass(frozen=True)
class Affine:
    """Integers 0..top with the values `scale * (integer - zero_point)`."""

    scale: float
    zero_point: int
    top: int


class Dialect:
    """Operators of a back end for integer layers: PT2E's, with unsigned activations, unless overridden.

    An `Affine` counts from 0; the back end's integers are `lowest` to `lowest + 255`, of `dtype`.
    """

    integer_bias = False  # whether a layer with known input scale gets an int32 bias
    one_channel = True  # whether convolutions of one channel are correct; otherwise a channel of zeros is added
    lowest, dtype = 0, torch.uint8  # of activations

    def __init__(self) -> None:
        import torch.ao.quantization.fx._decomposed  # registers them

        self.ops = torch.ops.quantized_decomposed

    def rounded(self, x: Tensor, affine: Affine) -> Tensor:
        """Round x to the values of `affine`, as float32."""
        arguments = (affine.scale, affine.zero_point + self.lowest, self.lowest, self.lowest + 255, self.dtype)
        q = self.ops.quantize_per_tensor.default(x, *arguments)
        if affine.top < 255:  # inductor's fused kernels saturate at 255, whatever the arguments say
            q = q.clamp(max=affine.top + self.lowest)
        out: Tensor = self.ops.dequantize_per_tensor.default(q, *arguments)
        return out

    def rounded_dynamically(self, x: Tensor) -> Tensor:
        """Round x to 256 values between its minimum and maximum."""
        bounds, least = (self.lowest, self.lowest + 255), torch.finfo(torch.float32).tiny
        arguments = (*self.ops.choose_qparams.tensor(x, *bounds, least, self.dtype), *bounds, self.dtype)
        q = self.ops.quantize_per_tensor.tensor(x, *arguments)
        out: Tensor = self.ops.dequantize_per_tensor.tensor(q, *arguments)
        return out

    def dequantized(self, integers: Tensor, scale: Tensor) -> Tensor:
        """Multiply int8 or int32 `[out, ...]` by a scale `[out]`, or `[out, groups]` with groups along axis 1."""
        if scale.dim() == 2:
            return scaled(integers, scale)
        zeros = torch.zeros(len(scale), dtype=torch.int64)
        out: Tensor = self.ops.dequantize_per_channel.default(integers, scale, zeros, 0, -127, 127, torch.int8)
        return out

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the linear layer of x `[..., in]`, weight `[out, in]` and bias `[out]`."""
        return F.linear(x, weight, bias)

    def dynamic_linear(self, x: Tensor, integers: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
        """Return the linear layer of x `[..., in]`, rounded dynamically to 8 bits, with int8 `[out, in]`."""
        return F.linear(self.rounded_dynamically(x), self.dequantized(integers, scale), bias)


class Inductor(Dialect):
    """PT2E's operators as inductor lowers them to oneDNN's integer kernels in a frozen graph."""

    # inductor assumes that the output of its integer kernel is contiguous if one channel makes the layout of the input
    # ambiguous, but it is not
    one_channel = False


def scaled(integers: Tensor, scale: Tensor) -> Tensor:
    """Return the values of integers `[out, ...]` with a scale `[out]` or `[out, groups]`, as floats."""
    if scale.dim() == 2:
        return (integers.unflatten(1, (scale.shape[1], -1)).float() * scale[:, :, None]).flatten(1, 2)
    return integers.float() * scale.view(-1, *[1] * (integers.dim() - 1))


def to_float(layer: Any) -> None:
    """Replace a layer's integer weights by their float values."""
    layer.integers, layer.scale = scaled(layer.integers, layer.scale).view(layer.full), None


class _Integers(nn.Module):
    """Base of the integer layers. `_convert` makes them from quantized layers by assigning the class."""

    dialect: Dialect
    source: Affine | str | None  # range of the input, "dynamic", or None for float
    integers: Tensor  # or floats, by `to_float`
    scale: Tensor
    offset: Tensor | None  # the bias: float32, or int32 in units of offset_scale
    offset_scale: Tensor | None
    full: tuple[int, ...]  # shape of the weight

    @property
    def weights(self) -> Tensor:
        is_float = self.integers.is_floating_point()
        weight = self.integers if is_float else self.dialect.dequantized(self.integers, self.scale)
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
        return self._conv_forward(_read(x, self.source, self.dialect), self.weights, self.offsets)


class IntegerLinear(_Integers, nn.Linear):
    """A linear layer with integer weights."""

    def forward(self, x: Tensor) -> Tensor:
        if self.source == DYNAMIC and not self.integers.is_floating_point():
            return self.dialect.dynamic_linear(x, self.integers, self.scale, self.offset)
        return self.dialect.linear(_read(x, self.source, self.dialect), self.weights, self.offsets)


class IntegerEmbedding(_Integers, nn.Embedding):
    """An embedding with integer weights; only the rows that are looked up become floats."""

    def forward(self, x: Tensor) -> Tensor:
        rows = F.embedding(x, self.integers).float()
        if self.scale.dim() == 2:
            groups = rows.unflatten(-1, (self.scale.shape[1], -1))
            return (groups * F.embedding(x, self.scale).unsqueeze(-1)).flatten(-2)
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


def deployable(net: nn.Module, example: Tensor | tuple[Tensor, ...], dialect: Dialect) -> nn.Module:
    """Return a copy of `net` for tracing, with its quantized layers written in `dialect`.

    The copy is in eval mode on the CPU. ONNX's operators compute nothing in torch, so it can't be run. Signs of folded
    BatchNorms go into the integers, their magnitudes into the scales.
    """
    names = quantized_layers(net).keys()
    require(bool(names), "the net has no quantized layer: train with compression=qat, or run scripts/compress.py.")
    converted = copied(net)
    inputs = example if isinstance(example, tuple) else (example,)
    norms = followers(copied(net, floats=True), inputs[0] if len(inputs) == 1 else Call(inputs))
    twins: dict[int, Any] = {}  # by the id of the weight, which layers may share, such as a tied head
    for name in names:
        layer: Any = converted.get_submodule(name)
        if isinstance(layer, QuantAdd):
            sources = [_source(layer.input_quantizer, name), _source(layer.other_quantizer, name)]
            layer.__class__ = IntegerAdd  # type: ignore[assignment]  # hooks and name stay
            del layer._modules["input_quantizer"], layer._modules["other_quantizer"]
            layer.__dict__.update(first=sources[0], second=sources[1], dialect=dialect)
            continue
        weight, norm = id(layer.weight), converted.get_submodule(norms[name]) if name in norms else None
        if norm is not None and norm.running_mean is None:  # it normalizes by the batch
            norm = None
        _convert(name, layer, dialect, norm)
        if norm is not None:
            converted.set_submodule(norms[name], nn.Identity().eval())
        twin = twins.setdefault(weight, layer)
        if torch.equal(twin.integers, layer.integers) and torch.equal(twin.scale, layer.scale):
            layer.integers, layer.scale = twin.integers, twin.scale
    return converted


def copied(net: nn.Module, *, floats: bool = False) -> nn.Module:
    """Return a float32 copy in eval mode on the CPU without gradients; `floats` replaces quantized layers."""
    net = strip(net) if floats else copy.deepcopy(net)
    return net.cpu().float().eval().requires_grad_(False)


def _source(quantizer: FakeQuantize | None, name: str) -> Affine | str | None:
    """Return how a layer quantizes its input: a range, "dynamic", or None."""
    if quantizer is None:
        return None
    require(quantizer.is_enabled, NOT_ROUNDED.format(name))
    if quantizer.follows:
        message = f"{name} has {quantizer.bits} bits for dynamic ranges, which no back end has: take 8, or static ones."
        require(quantizer.bits == 8, message)
        return DYNAMIC
    scale = quantizer.scale.detach().float().clamp_min(TINY)
    return Affine(float(scale), int(quantizer.zero_point.round()), quantizer.high)


def _convert(name: str, layer: Any, dialect: Dialect, norm: Any) -> None:
    """Convert a quantized layer to an integer layer in place."""
    source = _source(getattr(layer, "input_quantizer", None), name)
    rounded = layer.weight_quantizer is not None and layer.weight_quantizer.is_enabled
    require(rounded, NOT_ROUNDED.format(name))
    integers, scale = integer_weight(layer)
    full, out = tuple(integers.shape), integers.shape[0]
    scale = scale.double().clamp_min(TINY)
    scale = scale.expand(out).clone() if scale.dim() == 1 else scale.clone()
    bias = None if getattr(layer, "bias", None) is None else layer.bias.detach().double()
    if norm is not None:
        # in eval mode it is y = g x + b
        ones = torch.ones(out, dtype=torch.float64)
        weight = ones if norm.weight is None else norm.weight.detach().double()
        b = 0 * ones if norm.bias is None else norm.bias.detach().double()
        g = weight / torch.sqrt(norm.running_var.double() + norm.eps)
        b = b - g * norm.running_mean.double()
        bias = b if bias is None else g * bias + b
        scale = scale * g.abs().view(-1, *[1] * (scale.dim() - 1))
        integers = torch.where((g < 0).view(-1, *[1] * (len(full) - 1)), -integers, integers)
    scale = scale.clamp_min(SMALLEST_SCALE)
    offset_scale = None
    if bias is not None and isinstance(source, Affine) and dialect.integer_bias and scale.dim() == 1:
        # store whole multiples of integers with few bits: the bias is rounded to units of the scale
        finer = 127 // layer.weight_quantizer.high
        integers, scale = integers * finer, scale / finer
        # raise scales so that the bias fits into 32 bits, for pruned channels and others with tiny weights
        wide = torch.maximum(scale, bias.abs() / (source.scale * LARGEST_BIAS))
        ratio = (scale / wide).view(-1, *[1] * (integers.dim() - 1))
        integers, scale = torch.where(ratio < 1, torch.round(integers * ratio), integers).to(torch.int8), wide
        offset_scale = scale * source.scale
        bias = torch.round(bias / offset_scale).to(torch.int32)
    elif bias is not None:
        bias = bias.float()
    one_channel = isinstance(layer, nn.Conv2d) and layer.in_channels == 1
    if one_channel and not dialect.one_channel and source is not None and scale.dim() == 1:
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
