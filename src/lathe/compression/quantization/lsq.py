"""Learned step size quantization: Esser et al. 2020, arXiv:1902.08153."""

from typing import Any

import torch
from torch import Tensor

TINY = 1e-9  # smallest step size that back ends get


class LearnedStep(torch.autograd.Function):
    """Fake quantization with a trained scale, in float32, cast to x's format.

    `growth`, the logarithm of the scale, and `scale` broadcast with x; only `scale` is read. The gradient of x passes
    inside the range and is zero outside. That of the scale is the sum of (rounded - exact) inside the range and of the
    bound outside, times `factor`, in the paper 1 / sqrt(n * largest integer). That of `growth` is it over the scale: to
    first order the paper's step under SGD, and the learning rate's share of the scale under Adam.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        growth: Tensor,
        scale: Tensor,
        zero_point: Tensor | None,
        low: int,
        high: int,
        factor: float,
    ) -> Tensor:
        ctx.save_for_backward(x, scale, zero_point)
        ctx.settings = low, high, factor, growth.dtype
        q = torch.div(x.float(), scale).round_()
        if zero_point is None:
            q.clamp_(low, high)
        else:
            q.add_(zero_point).clamp_(low, high).sub_(zero_point)
        return q.mul_(scale).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None, None, None, None]:
        x, scale, zero_point = ctx.saved_tensors
        low, high, factor, kind = ctx.settings
        grad = grads[0].float()
        # Arithmetic instead of masks: on a CPU these kernels are vectorized, comparisons are not.
        exact = torch.div(x.float(), scale)
        if zero_point is not None:
            exact.add_(zero_point)
        rounded = exact.round().clamp_(low, high)
        middle = (high + low) / 2
        within = torch.ops.aten.threshold_backward(grad, (exact - middle).abs_().neg_(), -(high - low + 1) / 2)
        # inside: rounded - exact; outside: the bound
        slope = rounded if zero_point is None else rounded.sub_(zero_point)
        slope.mul_(grad).sub_((exact if zero_point is None else exact.sub_(zero_point)).mul_(within))
        dims = [i for i in range(slope.dim()) if scale.dim() != slope.dim() or scale.shape[i] == 1]
        total = slope.sum(dims, keepdim=True) if scale.dim() == slope.dim() else slope.sum()
        return within.to(x.dtype), (total.view_as(scale) * (factor / scale)).to(kind), None, None, None, None, None


class Untouched(torch.autograd.Function):
    """Identity with a zero gradient for an inactive scale: DDP waits for every parameter's gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(scale)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        return grads[0], torch.zeros_like(ctx.saved_tensors[0])


def first_step(weight: Tensor, high: int, dims: list[int]) -> Tensor:
    """Return the paper's first step size over `dims`, 2 * mean |w| / sqrt(largest integer); 1 for zeros."""
    mean = weight.detach().float().abs().mean(dims, keepdim=True)
    return torch.where(mean > 0, 2 * mean / high**0.5, 1.0)
