"""How a back end is told of integers: the same few words in ONNX, which ONNX Runtime fuses, and in torch, which inductor fuses."""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Affine:
    """Integers 0..top that stand for `scale * (integer - zero_point)`."""

    scale: float
    zero_point: int
    top: int


class Dialect(Protocol):
    """What a layer of integers is written with while a net is traced for one back end."""

    integer_bias: bool  # whether the bias of a layer with known input scale is to be int32

    def rounded(self, x: Tensor, affine: Affine) -> Tensor:
        """x as the nearest values that the integers can say, float32."""

    def rounded_dynamically(self, x: Tensor) -> Tensor:
        """x as the nearest of 256 values between the lowest and the highest of its own."""

    def dequantized(self, integers: Tensor, scale: Tensor) -> Tensor:
        """int8 or int32 `[out, ...]` times scale `[out]`; with a scale `[out, groups]`, the second axis has one for each group."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """x `[..., in]`, weight `[out, in]`, bias `[out]`."""

    def dynamic_linear(self, x: Tensor, integers: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
        """x `[..., in]`, rounded to 8 bits between the lowest and the highest of its values, times int8 `[out, in]`."""


class Onnx:
    """ONNX's operators, in the arrangement that ONNX Runtime makes integer kernels of."""

    integer_bias = True

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
        return tuple(torch.onnx.ops.symbolic_multi_out("DynamicQuantizeLinear", (x,), dtypes=types, shapes=(x.shape, (), ())))

    def dequantized(self, integers: Tensor, scale: Tensor) -> Tensor:
        attributes = {"axis": 0} if scale.dim() == 1 else {"axis": 1, "block_size": integers.shape[1] // scale.shape[1]}
        zeros = torch.zeros_like(scale, dtype=integers.dtype)  # ONNX Runtime fuses no Gemm without them
        return _op("DequantizeLinear", (integers, scale, zeros), torch.float32, integers.shape, **attributes)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        # Gemm takes an integer bias and two axes
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


class Inductor:
    """The operators that PT2E's convert emits, which inductor lowers to oneDNN's integer kernels when it freezes a graph."""

    integer_bias = False

    def __init__(self) -> None:
        import torch.ao.quantization.fx._decomposed  # registers them

        self.ops = torch.ops.quantized_decomposed

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
        out: Tensor = self.ops.dequantize_per_tensor.tensor(self.ops.quantize_per_tensor.tensor(x, *arguments), *arguments)
        return out

    def dequantized(self, integers: Tensor, scale: Tensor) -> Tensor:
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
