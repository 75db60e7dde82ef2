"""Learned step size quantization: Esser et al. 2020, arXiv:1902.08153."""

from typing import Any

import torch
from torch import Tensor

TINY = 1e-9  # the least step size that back ends are given


class LearnedStep(torch.autograd.Function):
    """Fake quantization whose scale is trained; float32 inside, the input's format outside.

    `growth`, the logarithm of the scale, and `scale` are of a shape that broadcasts with x; the value comes from
    `scale` alone. Gradient of x: straight through within the range, none outside. Gradient of the scale: sum of
    (rounded - exact) within the range and of the bound outside, times `factor`, 1 / sqrt(n * largest integer) in the
    paper. That of `growth` is it over the scale, which under SGD is the paper's step to first order, and under Adam a
    step of the learning rate's share of the scale.
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
        # Plain arithmetic in place of masks: these kernels are vectorised on a CPU, comparisons are not.
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
    """x itself, and a gradient of zero for a scale that does not act yet: DistributedDataParallel waits for every
    parameter's gradient.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(scale)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        return grads[0], torch.zeros_like(ctx.saved_tensors[0])


def first_step(weight: Tensor, high: int, dims: list[int]) -> Tensor:
    """The paper's first step size, 2 * mean |w| / sqrt(largest integer), over `dims`; one, where all weights are
    zero.
    """
    mean = weight.detach().float().abs().mean(dims, keepdim=True)
    return torch.where(mean > 0, 2 * mean / high**0.5, 1.0)
