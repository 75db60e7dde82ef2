"""LAMB (You et al. 2020, arXiv:1904.00962) and LARS (You et al. 2017, arXiv:1708.03888).

The learning rate of each tensor is scaled by the ratio of its norm to its update's, for batches of thousands.
"""

from collections.abc import Callable
from typing import Any, overload

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from lathe.config.types import Betas, NonNegative, Positive, ShareBelowOne
from lathe.config.validation import validated
from lathe.optim.descent import descend


def _norm(tensor: Tensor) -> Tensor:
    """Return the L2 norm of a tensor, in at least float32; of a sharded one, over all its shards."""
    norm = torch.linalg.vector_norm(tensor, dtype=torch.promote_types(tensor.dtype, torch.float32))
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def trust_ratio(weight: Tensor, update: Tensor, scale: float = 1.0, decay: float = 0.0, eps: float = 0.0) -> Tensor:
    """Return `scale * |weight| / (|update| + decay * |weight| + eps)`, 1 for zero norms; on the device."""
    ours, theirs = _norm(weight), _norm(update)
    there = (ours > 0) & (theirs > 0)
    return torch.where(there, scale * ours / torch.where(there, theirs + decay * ours + eps, 1.0), 1.0)


class _LayerWise(Optimizer):
    """Base of LARS and LAMB: calls `_update` for each parameter that has a gradient.

    Groups whose name ends in `no_decay` get no trust ratio: the papers' implementations exclude norms and biases, which
    would move too far.
    """

    needs_whole_weights = True  # a strategy that shards flat parameters has no norm of a tensor
    needs_closure = False

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Take one step; return the loss if a `closure` computes it."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            adapted = not group.get("name", "").endswith("no_decay")
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, self.state[parameter], group, adapted)
        return loss

    def _update(
        self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any], adapted: bool
    ) -> None:
        raise NotImplementedError


class LARS(_LayerWise):
    """SGD with momentum and a trust ratio per tensor.

    The gradient `g + weight_decay * w` is multiplied by `trust_coefficient * |w| / (|g| + weight_decay * |w| + eps)`.
    As in torch's SGD, and unlike the paper, the learning rate is outside the momentum. A group named `no_decay` (norms,
    biases) has no ratio. State per parameter: `momentum_buffer`.
    """

    @validated
    def __init__(
        self,
        params: ParamsT,
        lr: Positive = 1.0,
        weight_decay: NonNegative = 0.0,
        momentum: ShareBelowOne = 0.9,
        nesterov: bool = False,
        trust_coefficient: Positive = 0.001,
        eps: NonNegative = 1e-8,
    ) -> None:
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "trust_coefficient": trust_coefficient,
            "eps": eps,
        }
        super().__init__(params, defaults)

    def _update(
        self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any], adapted: bool
    ) -> None:
        update = gradient.add(parameter, alpha=group["weight_decay"])
        if adapted:
            scale, decay = group["trust_coefficient"], group["weight_decay"]
            update = update * trust_ratio(parameter, gradient, scale, decay, group["eps"]).to(update.dtype)
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        buffer = state["momentum_buffer"]
        buffer.mul_(group["momentum"]).add_(update)
        direction = update.add(buffer, alpha=group["momentum"]) if group["nesterov"] else buffer
        descend(parameter, direction, group["lr"])


class LAMB(_LayerWise):
    """AdamW's update with bias correction and weight decay, times `|w| / |update|` in each tensor.

    This is Algorithm 2 of the paper with the identity as scaling function. A group named `no_decay` (norms, biases) has
    no ratio. State per parameter: `step`, `exp_avg`, `exp_avg_sq`.
    """

    @validated
    def __init__(
        self,
        params: ParamsT,
        lr: Positive = 1e-3,
        weight_decay: NonNegative = 0.01,
        betas: Betas = (0.9, 0.999),
        eps: NonNegative = 1e-6,
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "betas": betas, "eps": eps})

    def _update(
        self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any], adapted: bool
    ) -> None:
        if not state:
            state["step"] = torch.zeros(())
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        state["step"] += 1
        beta1, beta2 = group["betas"]
        step = state["step"] if isinstance(group["lr"], Tensor) else float(state["step"])  # compiled, or on the CPU
        state["exp_avg"].lerp_(gradient, 1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        root = (state["exp_avg_sq"] / (1 - beta2**step)).sqrt_().add_(group["eps"])
        update = (state["exp_avg"] / (1 - beta1**step)).div_(root).add_(parameter, alpha=group["weight_decay"])
        if adapted:
            update = update * trust_ratio(parameter, update).to(update.dtype)
        descend(parameter, update, group["lr"])
