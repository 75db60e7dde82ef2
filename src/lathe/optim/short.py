"""Low-overhead SGD and scheduler steps for small nets, where torch's Python code takes most time."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

MOST = 2**18  # scalars: in larger nets, updating one tensor after the other uses the processor's cache better
# options of a group that change the operations
PLAIN = {"foreach": None, "fused": None, "differentiable": False, "maximize": False}


def short_step(optimizer: Optimizer) -> Callable[[], Any]:
    """Return `optimizer.step`, or a faster function with bitwise equal weights and states.

    SGD on the CPU then makes three calls per group of parameters, not per parameter. It calls torch's own step as soon
    as step hooks are registered or the step is replaced.
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
        tensors = [_tensors(group, optimizer.state) for group in optimizer.param_groups]
        if None in tensors or _is_watched(optimizer):
            optimizer.step()
            return
        vars(optimizer)["_opt_called"] = True  # torch's schedulers check it for a step before theirs
        for group, (parameters, gradients, buffers) in zip(optimizer.param_groups, tensors, strict=True):  # type: ignore[misc]
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
    """Return `optimizer.zero_grad`, or the same without torch's overhead."""
    if type(optimizer).zero_grad is not Optimizer.zero_grad or "zero_grad" in vars(optimizer):
        return optimizer.zero_grad

    def zero_grad() -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    return zero_grad


def short_schedule(scheduler: LRScheduler) -> Callable[[], Any]:
    """Return `scheduler.step` or, of a LambdaLR, the same rates and state without torch's overhead."""
    if type(scheduler) is not LambdaLR or "step" in vars(scheduler):
        return scheduler.step
    inner: Any = scheduler

    def step() -> None:
        groups, count = inner.optimizer.param_groups, inner.last_epoch + 1
        rates = [base * factor(count) for base, factor in zip(inner.base_lrs, inner.lr_lambdas, strict=True)]
        are_floats = all(type(rate) is float for rate in rates) and all(type(group["lr"]) is float for group in groups)
        if not are_floats or inner._step_count <= 1:  # torch's own first step checks that the optimizer stepped before
            scheduler.step()
            return
        inner.last_epoch, inner._last_lr = count, rates
        inner._step_count += 1
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate

    return step


def _tensors(group: dict[str, Any], state: Any) -> tuple[list[Tensor], list[Tensor], list[Tensor]] | None:
    """Return parameters, gradients and momentum buffers; None if torch must step (no buffers, or sparse)."""
    parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
    gradients = [parameter.grad for parameter in parameters]
    if any(gradient.layout is not torch.strided for gradient in gradients):
        return None
    if not group["momentum"]:
        return parameters, gradients, []
    buffers = []
    for parameter in parameters:
        entry = state.get(parameter)  # [] would create an entry
        if entry is None or entry.get("momentum_buffer") is None:
            return None
        buffers.append(entry["momentum_buffer"])
    return parameters, gradients, buffers


def _is_watched(optimizer: Optimizer) -> bool:
    """Return whether hooks or a replacement affect the optimizer's step."""
    replaced = vars(optimizer).get("step")
    # a scheduler wraps it to record that it was called
    is_sgd = replaced is None or getattr(replaced, "__wrapped__", None) is SGD.step
    hooks = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    return bool(not is_sgd or hooks or _global_optimizer_pre_hooks or _global_optimizer_post_hooks)
