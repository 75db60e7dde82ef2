"""An optimizer step as one compiled function, `compile.scope=step`."""

import inspect
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from itertools import chain
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from lathe.errors import UserError, require
from lathe.strategies.compilation import compiler_arguments

# these hooks run within a step, so they can't be called if the step is one function
WITHIN = ("on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step")
KEY = "compile.scope=step"


class WholeStep:
    """Compiles forward, loss, backward, clipping and optimizer step as one graph of torch.compile.

    This removes the overhead of Python and between kernels in small nets. The first step of a new run is eager, because
    optimizers create their state in it. Gradients are written into the parameters' `grad`, which stay the same tensors.
    Learning rates are tensors in the graph, so that a schedule causes no recompilation; other code reads numbers.

    `task.net` and `task.objective` make the step; `mode`, `dynamic`, `backend` and `options` are torch.compile's.
    """

    def __init__(
        self,
        task: Any,
        mode: str = "default",
        dynamic: bool | None = None,
        backend: str = "inductor",
        options: Mapping[str, Any] | None = None,
        device_type: str = "cpu",
    ) -> None:
        config: Any = torch._dynamo.config
        require(
            hasattr(config, "trace_autograd_ops"),
            f"{KEY}: torch {torch.__version__} can't capture a backward pass: use torch 2.13 or newer, or "
            "compile.scope=net.",
        )
        config.trace_autograd_ops = True
        self.task = task
        self.arguments = compiler_arguments(task.net, mode, dynamic, True, backend, options, device_type)
        self._copies = mode in ("reduce-overhead", "max-autotune")  # their CUDA graphs overwrite earlier results
        self._function: Any = None
        self._optimizer: Any = None
        self._hooks: list[Callable[[Tensor], None]] = []
        self._captured = False
        self._fixed: list[dict[str, Any]] = []

    def bind(self, trainer: Any) -> None:
        """Prepare for this Trainer's optimizer and number format, once."""
        optimizer = trainer.optimizers[0]
        if optimizer is self._optimizer:
            return
        # hooks within a step would not be called, but for those of callbacks with `on_whole_step`
        module = trainer.lightning_module
        steps = ("training_step", "optimizer_step", "backward", "configure_gradient_clipping")
        owners = [callback for callback in trainer.callbacks if not callable(getattr(callback, "on_whole_step", None))]
        uncalled = [
            f"{type(owner).__name__}.{name}"
            for owner in owners
            for name in WITHIN
            if getattr(type(owner), name) is not getattr(Callback, name) and callable(getattr(owner, name))
        ]
        uncalled += [
            f"{type(module).__name__}.{name}"
            for name in (*WITHIN, *steps)
            if is_overridden(name, module) and not getattr(getattr(type(module), name), "is_in_whole_step", False)
        ]
        require(
            not uncalled,
            f"{KEY}: {', '.join(uncalled)} is not called in a compiled step. Leave it out, or use compile.scope=net.",
        )
        require(
            self.task.objective == self.task.losses,
            f"{KEY} does not call what wraps the loss of {type(self.task).__name__}. Use compile.scope=net.",
        )
        require(
            type(optimizer) is not LBFGS
            and not optimizer._optimizer_step_pre_hooks
            and not _global_optimizer_pre_hooks,
            f"{KEY}: the step of {type(optimizer).__name__} runs code in its middle. Use compile.scope=net.",
        )
        self._optimizer, self._captured = optimizer, False
        hooks = [getattr(callback, "on_whole_step", None) for callback in trainer.callbacks]
        self._hooks = [partial(hook, trainer, trainer.lightning_module) for hook in hooks if hook is not None]
        self._parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        for parameter in self._parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self._gradients: list[Any] = [parameter.grad for parameter in self._parameters]
        device = trainer.strategy.root_device
        self._rates = [torch.tensor(float(group["lr"]), device=device) for group in optimizer.param_groups]
        self._copies = self._copies and device.type == "cuda"
        self._function = torch.compile(self._make(trainer, optimizer), **self.arguments)

    def _make(self, trainer: Trainer, optimizer: Optimizer) -> Callable[[Any], tuple[Tensor, Any]]:
        net: nn.Module = self.task.net
        parameters, gradients = self._parameters, self._gradients
        update = inspect.unwrap(type(optimizer).step)  # without the profiler's wrapper, which would break the graph
        value, algorithm = trainer.gradient_clip_val or 0.0, trainer.gradient_clip_algorithm
        mixed = isinstance(trainer.precision_plugin, MixedPrecision)
        device = trainer.strategy.root_device.type

        def step(batch: Any) -> tuple[Tensor, Any]:
            with torch.autocast(device, dtype=torch.bfloat16, cache_enabled=False) if mixed else nullcontext():
                outputs = net._call_impl(batch[0])  # not evaluation's compiled call, which is another graph
                terms = list(self.task.objective(outputs, batch).values())
                loss = terms[0] if len(terms) == 1 else torch.stack(terms).sum()
            for gradient, new in zip(gradients, torch.autograd.grad(loss, parameters), strict=True):
                gradient.copy_(new)
            with torch.no_grad():
                if value and algorithm == "value":
                    nn.utils.clip_grad_value_(parameters, value)
                elif value:
                    nn.utils.clip_grad_norm_(parameters, value)
                update(optimizer)
            return loss.detach(), outputs.detach()

        return step

    def __call__(self, batch: Any) -> Tensor:
        """Run the step; return its loss."""
        groups = self._optimizer.param_groups
        if self._parameters[0].grad is not self._gradients[0]:  # Lightning frees them before a validation
            for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
                parameter.grad = gradient
        numbers = [group["lr"] for group in groups]
        for group, rate, number in zip(groups, self._rates, numbers, strict=True):
            group["lr"] = rate.fill_(number)
        fixed = _fixed(self._optimizer)
        try:
            loss, outputs = (
                self._function(batch) if self._captured and fixed == self._fixed else self._first_call(batch)
            )
            self._captured, self._fixed = True, fixed
        finally:
            for group, number in zip(groups, numbers, strict=True):
                group["lr"] = number
        optimizer = self._optimizer
        optimizer._opt_called = True  # schedulers check it to warn of a first step before the optimizer's
        for hook in chain(optimizer._optimizer_step_post_hooks.values(), _global_optimizer_post_hooks.values()):
            hook(optimizer, (), {})
        if self._copies:
            loss, outputs = loss.clone(), outputs.clone()
        self.task.add_training(outputs, batch, loss)
        for hook in self._hooks:
            hook(loss)
        return loss

    def _first_call(self, batch: Any) -> tuple[Tensor, Any]:
        """Run a step that has to be compiled; after the first, raise an error for the setting that changed."""
        if self._captured:
            now, then = _fixed(self._optimizer), self._fixed
            name = next(key for new, old in zip(now, then, strict=True) for key in new if new[key] != old[key])
            raise UserError(
                f"{KEY}: something changes {name} of {type(self._optimizer).__name__} during training, and only lr may "
                "change (cycle_momentum=false). Or use compile.scope=net."
            )
        # What a step writes to is static, for CUDA graphs: by default, inductor assumes that gradients and the state of
        # foreign optimizers may be other tensors at the next step. Eager optimizers count steps on the CPU.
        for parameter in self._parameters:
            state = self._optimizer.state.get(parameter, {})
            for name, value in state.items():
                if isinstance(value, Tensor) and value.device != parameter.device:
                    state[name] = value.to(parameter.device)
        states = (value for state in self._optimizer.state.values() for value in state.values())
        for tensor in (*self._gradients, *self._rates, *states):
            if isinstance(tensor, Tensor):
                torch._dynamo.mark_static_address(tensor)
        try:
            return self._function(batch)
        except torch._dynamo.exc.Unsupported as error:
            reason = str(error).strip().splitlines()[0]
            raise UserError(
                f"{KEY}: the step can't be captured as one graph ({reason}): use compile.scope=net."
            ) from error
        except RuntimeError as error:
            require(
                "not have been used" not in str(error),
                f"{KEY}: a parameter of {type(self.task.net).__name__} has no part in the loss: freeze it, or use "
                "compile.scope=net.",
            )
            raise


def _fixed(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The settings of the optimizer's groups that are constants of the graph."""
    plain = (bool, int, float, str, tuple, type(None))
    return [
        {key: value for key, value in group.items() if key != "lr" and isinstance(value, plain)}
        for group in optimizer.param_groups
    ]
