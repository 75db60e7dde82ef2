"""Quantize and dequantize operators of each back end: ONNX's for ONNX Runtime, torch's for inductor."""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from lathe.errors import UserError
from lathe.export import sums


@dataclass(frozen=True)
class Affine:
    """Integers 0..top with the values `scale * (integer - zero_point)`."""

    scale: float
    zero_point: int
    top: int


class Dialect(Protocol):
    """Operators for tracing integer layers for one back end."""

    integer_bias: bool  # whether a layer with known input scale gets an int32 bias
    one_channel: bool  # whether convolutions of one channel are correct; otherwise a channel of zeros is added

    def rounded(self, x: Tensor, affine: Affine) -> Tensor:
        """Round x to the values of `affine`, as float32."""

    def rounded_dynamically(self, x: Tensor) -> Tensor:
        """Round x to 256 values between its minimum and maximum."""

    def dequantized(self, integers: Tensor, scale: Tensor) -> Tensor:
        """Multiply int8 or int32 `[out, ...]` by a scale `[out]`, or `[out, groups]` with groups along axis 1."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the linear layer of x `[..., in]`, weight `[out, in]` and bias `[out]`."""

    def dynamic_linear(self, x: Tensor, integers: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
        """Return the linear layer of x `[..., in]`, rounded dynamically to 8 bits, with int8 `[out, in]`."""


class Onnx:
    """ONNX's operators, in the patterns that ONNX Runtime fuses into integer kernels."""

    integer_bias = True
    one_channel = True

    def rounded(self, x: Tensor, affine: Affine) -> Tensor:
        scale, zero = torch.tensor(affine.scale), torch.tensor(affine.zero_point, dtype=torch.uint8)
        q = _op("QuantizeLinear", (x, scale, zero), torch.uint8, x.shape)
        if affine.top < 255:  # QuantizeLinear saturates at 255
            q = _op("Min", (q, torch.tensor(affine.top, dtype=torch.uint8)), torch.uint8, x.shape)
        return _op("DequantizeLinear", (q, scale, zero), torch.float32, x.shape)

    def rounded_dynamically(self, x: Tensor) -> Tensor:
        return _op("DequantizeLinear", self._dynamic(x), torch.float32, x.shape)

    def _dynamic(self, x: Tensor) -> tuple[Tensor, ...]:
        types = (torch.uint8, torch.float32, torch.uint8)
        return tuple(
            torch.onnx.ops.symbolic_multi_out("DynamicQuantizeLinear", (x,), dtypes=types, shapes=(x.shape, (), ()))
        )

    def dequantized(self, integers: Tensor, scale: Tensor) -> Tensor:
        attributes = {"axis": 0} if scale.dim() == 1 else {"axis": 1, "block_size": integers.shape[1] // scale.shape[1]}
        zeros = torch.zeros_like(scale, dtype=integers.dtype)  # ONNX Runtime fuses a Gemm only if it has them
        return _op("DequantizeLinear", (integers, scale, zeros), torch.float32, integers.shape, **attributes)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        # Gemm takes an integer bias, and inputs of two axes
        flat = x if x.dim() == 2 else x.flatten(0, -2)
        inputs = (flat, weight) if bias is None else (flat, weight, bias)
        out = _op("Gemm", inputs, torch.float32, (flat.shape[0], weight.shape[0]), transB=1)
        return out if x.dim() == 2 else out.unflatten(0, x.shape[:-1])

    def dynamic_linear(self, x: Tensor, integers: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
        q, x_scale, x_zero = self._dynamic(x)
        shape = (*x.shape[:-1], integers.shape[0])
        products = _op("MatMulInteger", (q, integers.t().contiguous(), x_zero), torch.int32, shape)
        out = _op("Cast", (products,), torch.float32, shape, to=1) * (x_scale * scale)
        return out if bias is None else out + bias


def _op(name: str, inputs: tuple[Tensor, ...], dtype: torch.dtype, shape: Any, **attributes: Any) -> Tensor:
    return torch.onnx.ops.symbolic(name, inputs, attributes, dtype=dtype, shape=shape)


class Symmetric(Onnx):
    """ONNX's operators for TensorRT: signed activations with zero point 0, float biases.

    A range of 8 bits, `lowest..highest`, becomes `-largest..largest`, with `largest` the greater of their magnitudes:
    nonnegative activations, such as those after a ReLU, have half as many values. Ranges of fewer bits are kept.
    Dynamic ranges are not supported.
    """

    integer_bias = False

    def prepare(self, layer: Any) -> None:
        """Store weights as floats if TensorRT has no integer kernel: for float activations or grouped scales."""
        if layer.source == "dynamic":
            raise UserError(
                "target=tensorrt has no activations whose range follows each input: quantize with static ranges, as "
                "compression=ptq_static and compression=qat do."
            )
        if layer.source is None or layer.scale.dim() == 2:
            to_float(layer)

    def rounded(self, x: Tensor, affine: Affine) -> Tensor:
        below, above = affine.zero_point, affine.top - affine.zero_point
        step = affine.scale * max(below, above, 127) / 127  # not finer than before: integers below 128 are unchanged
        if affine.top < 255:  # QuantizeLinear saturates at the ends of int8
            x = x.clamp(-affine.scale * below, affine.scale * above)
        scale, zero = torch.tensor(step), torch.tensor(0, dtype=torch.int8)
        q = _op("QuantizeLinear", (x, scale, zero), torch.int8, x.shape)
        return _op("DequantizeLinear", (q, scale, zero), torch.float32, x.shape)

    def dequantized(self, integers: Tensor, scale: Tensor) -> Tensor:
        return integers if integers.is_floating_point() else super().dequantized(integers, scale)


def scaled(integers: Tensor, scale: Tensor) -> Tensor:
    """Return the values of integers `[out, ...]` with a scale `[out]` or `[out, groups]`, as floats."""
    if scale.dim() == 2:
        return (integers.unflatten(1, (scale.shape[1], -1)).float() * scale[:, :, None]).flatten(1, 2)
    return integers.float() * scale.view(-1, *[1] * (integers.dim() - 1))


def to_float(layer: Any) -> None:
    """Replace a layer's integer weights by their float values."""
    layer.integers, layer.scale = scaled(layer.integers, layer.scale).view(layer.full), None


class Inductor:
    """PT2E's operators, which inductor lowers to oneDNN's integer kernels in a frozen graph."""

    integer_bias = False
    # inductor assumes that the output of its integer kernel is contiguous if one channel makes the layout of the input
    # ambiguous, but it is not
    one_channel = False

    def __init__(self) -> None:
        import torch.ao.quantization.fx._decomposed  # registers them

        self.ops = torch.ops.quantized_decomposed

    def prepare(self, layer: Any) -> None:
        """Store weights as floats if this processor would not sum the layer's integer products exactly."""
        if layer.source is None or layer.scale.dim() == 2 or sums.exact():
            return
        if not sums.fits(layer.integers, layer.source.top if isinstance(layer.source, Affine) else 255):
            to_float(layer)

    def rounded(self, x: Tensor, affine: Affine) -> Tensor:
        arguments = (affine.scale, affine.zero_point, 0, 255, torch.uint8)
        q = self.ops.quantize_per_tensor.default(x, *arguments)
        if affine.top < 255:  # the fused kernels saturate at 255, whatever the arguments say
            q = q.clamp(max=affine.top)
        out: Tensor = self.ops.dequantize_per_tensor.default(q, *arguments)
        return out

    def rounded_dynamically(self, x: Tensor) -> Tensor:
        least = torch.finfo(torch.float32).tiny
        arguments = (*self.ops.choose_qparams.tensor(x, 0, 255, least, torch.uint8), 0, 255, torch.uint8)
        out: Tensor = self.ops.dequantize_per_tensor.tensor(
            self.ops.quantize_per_tensor.tensor(x, *arguments), *arguments
        )
        return out

    def dequantized(self, integers: Tensor, scale: Tensor) -> Tensor:
        if integers.is_floating_point():
            return integers
        if scale.dim() == 2:
            groups = integers.unflatten(1, (scale.shape[1], -1))
            return (groups.float() * scale[:, :, None]).flatten(1, 2)
        zeros = torch.zeros(len(scale), dtype=torch.int64)
        out: Tensor = self.ops.dequantize_per_channel.default(integers, scale, zeros, 0, -127, 127, torch.int8)
        return out

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, weight, bias)

    def dynamic_linear(self, x: Tensor, integers: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(self.rounded_dynamically(x), self.dequantized(integers, scale), bias)


class Xnnpack(Inductor):
    """Inductor's operators in the patterns that ExecuTorch's partitioner for XNNPACK takes.

    Activations are signed, zero points are stored, and biases are float; XNNPACK converts these to 32-bit integers.
    """

    integer_bias = True  # for the scales: with them, the bias fits into XNNPACK's 32 bits
    one_channel = True

    def __init__(self, zeros: Tensor | None = None) -> None:
        super().__init__()
        self.zeros = (
            zeros  # zero points of one layer's weights, made before tracing: the partitioner takes only constants
        )

    def prepare(self, layer: Any) -> None:
        """Make biases float, and weights without an XNNPACK kernel: grouped scales or float activations."""
        if layer.offset_scale is not None:
            layer.offset, layer.offset_scale = (layer.offset.double() * layer.offset_scale.double()).float(), None
        if layer.source is None or layer.scale.dim() == 2:
            to_float(layer)
        else:
            layer.dialect = Xnnpack(torch.zeros(len(layer.scale), dtype=torch.int64))

    def rounded(self, x: Tensor, affine: Affine) -> Tensor:
        if affine.top < 255:  # XNNPACK saturates at the ends of int8, whatever the arguments say
            x = x.clamp(-affine.scale * affine.zero_point, affine.scale * (affine.top - affine.zero_point))
        arguments = (affine.scale, affine.zero_point - 128, -128, 127, torch.int8)
        out: Tensor = self.ops.dequantize_per_tensor.default(
            self.ops.quantize_per_tensor.default(x, *arguments), *arguments
        )
        return out

    def rounded_dynamically(self, x: Tensor) -> Tensor:
        least = torch.finfo(torch.float32).tiny
        arguments = (*self.ops.choose_qparams.tensor(x, -128, 127, least, torch.int8), -128, 127, torch.int8)
        out: Tensor = self.ops.dequantize_per_tensor.tensor(
            self.ops.quantize_per_tensor.tensor(x, *arguments), *arguments
        )
        return out

    def dequantized(self, integers: Tensor, scale: Tensor) -> Tensor:
        if integers.is_floating_point():
            return integers
        out: Tensor = self.ops.dequantize_per_channel.default(integers, scale, self.zeros, 0, -127, 127, torch.int8)
        return out
