"""Learned step size quantization: Esser et al. 2020, arXiv:1902.08153."""

from typing import Any

import torch
from torch import Tensor

TINY = 1e-9  # a step size that training has driven to zero or below acts as this


class LearnedStep(torch.autograd.Function):
    """Fake quantization whose scale is trained; float32 inside, the input's format outside.

    `scale` is of a shape that broadcasts with x. Gradient of x: straight through within the range, none outside. Gradient of the
    scale: sum of (rounded - exact) within the range and of the bound outside, times `factor`, 1 / sqrt(n * largest integer) in the paper.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, zero_point: Tensor | None, low: int, high: int, factor: float) -> Tensor:
        ctx.save_for_backward(x, scale, zero_point)
        ctx.settings = low, high, factor
        step = scale.float().clamp_min(TINY)
        q = torch.div(x.float(), step).round_()
        if zero_point is None:
            q.clamp_(low, high)
        else:
            q.add_(zero_point).clamp_(low, high).sub_(zero_point)
        return q.mul_(step).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None, None, None]:
        x, scale, zero_point = ctx.saved_tensors
        low, high, factor = ctx.settings
        grad = grads[0].float()
        exact = torch.div(x.float(), scale.float().clamp_min(TINY))
        if zero_point is not None:
            exact.add_(zero_point)
        clipped = exact.clamp(low, high)
        inside = clipped == exact
        # inside: rounded - exact; outside: the bound
        slope = torch.where(inside, clipped.round() - clipped, clipped if zero_point is None else clipped - zero_point)
        slope.mul_(grad)
        dims = [i for i in range(slope.dim()) if scale.dim() != slope.dim() or scale.shape[i] == 1]
        total = slope.sum(dims, keepdim=True) if scale.dim() == slope.dim() else slope.sum()
        return torch.where(inside, grad, 0.0).to(x.dtype), (total.view_as(scale) * factor).to(scale.dtype), None, None, None, None


class Untouched(torch.autograd.Function):
    """x itself, and a gradient of zero for a scale that does not act yet: DistributedDataParallel waits for every parameter's gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(scale)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        return grads[0], torch.zeros_like(ctx.saved_tensors[0])


def first_step(weight: Tensor, high: int, dims: list[int]) -> Tensor:
    """The paper's first step size, 2 * mean |w| / sqrt(largest integer), over `dims`; one, where all weights are zero."""
    mean = weight.detach().float().abs().mean(dims, keepdim=True)
    return torch.where(mean > 0, 2 * mean / high**0.5, 1.0)
