"""The update of a net so small that torch's optimizers and schedulers spend more time in Python than on its weights."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

MOST = 2**18  # weights: of more, one tensor after the other stays in the processor's cache for all its operations
# of a group, what changes the operations
PLAIN = {"foreach": None, "fused": None, "differentiable": False, "maximize": False}


def short_step(optimizer: Optimizer) -> Callable[[], Any]:
    """`optimizer.step`, or what does the same to its weights and states, digit by digit, in less time: SGD's operations
    of a group of parameters on the CPU are three calls, not three for each parameter. As soon as hooks of a step are
    registered, or it is replaced, it is torch's own again.
    """
    groups: list[dict[str, Any]] = optimizer.param_groups
    weights = [parameter for group in groups for parameter in group["params"]]
    if type(optimizer) is not SGD or _is_watched(optimizer) or sum(p.numel() for p in weights) > MOST:
        return optimizer.step
    fits = all(type(p.data) is Tensor and p.device.type == "cpu" and p.is_floating_point() for p in weights)
    plain = all(group[key] == value for group in groups for key, value in PLAIN.items())
    numbers = all(not isinstance(group[key], Tensor) for group in groups for key in ("lr", "weight_decay"))
    if not (fits and plain and numbers):
        return optimizer.step

    @torch.no_grad()
    def step() -> None:
        found = [_tensors(group, optimizer.state) for group in optimizer.param_groups]
        if None in found or _is_watched(optimizer):
            optimizer.step()
            return
        vars(optimizer)["_opt_called"] = True  # by which torch's schedulers see that they come behind a step
        for group, (parameters, gradients, buffers) in zip(optimizer.param_groups, found, strict=True):  # type: ignore[misc]
            if not parameters:
                continue
            if group["weight_decay"]:
                gradients = torch._foreach_add(gradients, parameters, alpha=group["weight_decay"])
            if group["momentum"]:
                torch._foreach_mul_(buffers, group["momentum"])
                torch._foreach_add_(buffers, gradients, alpha=1 - group["dampening"])
                if group["nesterov"]:
                    gradients = torch._foreach_add(gradients, buffers, alpha=group["momentum"])
                else:
                    gradients = buffers
            torch._foreach_add_(parameters, gradients, alpha=-group["lr"])

    return step


def short_zero_grad(optimizer: Optimizer) -> Callable[[], Any]:
    """`optimizer.zero_grad`, or the same without what torch does around it."""
    if type(optimizer).zero_grad is not Optimizer.zero_grad or "zero_grad" in vars(optimizer):
        return optimizer.zero_grad

    def zero_grad() -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    return zero_grad


def short_schedule(scheduler: LRScheduler) -> Callable[[], Any]:
    """`scheduler.step`, or the same rates and state without what torch does around them: of a LambdaLR."""
    if type(scheduler) is not LambdaLR or "step" in vars(scheduler):
        return scheduler.step
    kept: Any = scheduler

    def step() -> None:
        groups, count = kept.optimizer.param_groups, kept.last_epoch + 1
        rates = [base * factor(count) for base, factor in zip(kept.base_lrs, kept.lr_lambdas, strict=True)]
        known = all(type(rate) is float for rate in rates) and all(type(group["lr"]) is float for group in groups)
        if not known or kept._step_count <= 1:  # torch's own looks at the first, whether the optimizer was before it
            scheduler.step()
            return
        kept.last_epoch, kept._last_lr = count, rates
        kept._step_count += 1
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate

    return step


def _tensors(group: dict[str, Any], state: Any) -> tuple[list[Tensor], list[Tensor], list[Tensor]] | None:
    """A group's parameters that have a gradient, these, and what momentum has gathered; None where torch has to begin
    it, or has a way of its own.
    """
    parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
    gradients = [parameter.grad for parameter in parameters]
    if any(gradient.layout is not torch.strided for gradient in gradients):
        return None
    if not group["momentum"]:
        return parameters, gradients, []
    buffers = []
    for parameter in parameters:
        kept = state.get(parameter)  # [] would make one
        if kept is None or kept.get("momentum_buffer") is None:
            return None
        buffers.append(kept["momentum_buffer"])
    return parameters, gradients, buffers


def _is_watched(optimizer: Optimizer) -> bool:
    """Whether somebody else has a part in its step."""
    made = vars(optimizer).get("step")
    # a scheduler has wrapped it, which notes that it was called
    own = made is None or getattr(made, "__wrapped__", None) is SGD.step
    hooks = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    return bool(not own or hooks or _global_optimizer_pre_hooks or _global_optimizer_post_hooks)
