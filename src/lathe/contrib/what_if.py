"""Benchmark faster settings after training (bf16, channels_last, fused optimizer)."""

import copy
import math
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Annotated, Any

import psutil
import torch
from lightning.fabric.utilities.seed import _collect_rng_states, _set_rng_states
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import SingleDeviceStrategy
from pydantic import Field
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from lathe.callbacks.module_access import task_of
from lathe.config.types import NonNegativeInt
from lathe.config.validation import validated

WARMUP = 2  # untimed steps of each
COPIES = 10  # memory in multiples of the weights: two nets, their gradients, two optimizer states each, and a reserve
# the override for each
TYPED = {
    "bf16": "precision=bf16-mixed",
    "channels_last": "trainer.channels_last=true",
    "fused optimizer": "trainer.fused_optimizer=auto",
    "one thread": "launch.threads=1",  # threads wait for each other if the machine is also used by other programs
}


class WhatIf(Callback):
    """Time steps with the run's settings and with others after training, and print those that are faster.

    The others are bfloat16, channels last, a fused optimizer, all of these together, and one CPU thread. Steps
    alternate between two settings, on copies of net and loss with a batch of the run: forward, loss, backward, clipping
    and update, without the loop. The run's weights, metrics, checkpoints and random numbers do not change, unless net
    or loss keep state in classes or files. `_unrepeatable` returns why a run can't be measured.

    Args:
        steps: timed steps of each.
        at_least: smallest speedup that is printed.
        min_steps: optimizer steps that a fit must have made to be measured. 0 prints a line for every fit, also if
            nothing was measured or faster.
    """

    @validated
    def __init__(
        self,
        steps: Annotated[int, Field(ge=2)] = 5,
        at_least: Annotated[float, Field(ge=1)] = 1.1,
        min_steps: NonNegativeInt = 0,
    ) -> None:
        self.steps, self.at_least, self.min_steps = steps, at_least, min_steps
        self.line = ""  # the printed line
        self._batch: Any = None
        self._began = 0

    def skippable_steps(self, trainer: Trainer) -> float:
        """Count the steps before the one whose batch is kept; inf after it."""
        if self._batch is not None:
            return math.inf
        return max(0, self.min_steps - 1 - (trainer.global_step - self._began))

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._batch, self._began, self.line = None, trainer.global_step, ""

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._batch is None and trainer.global_step - self._began >= self.min_steps - 1:
            # in main memory: the device's may be full
            self._batch = tree_map(
                lambda leaf: leaf.detach().to("cpu", copy=True) if isinstance(leaf, Tensor) else leaf, batch
            )

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._batch is None or not trainer.is_global_zero:
            return
        states, threads = _collect_rng_states(), torch.get_num_threads()
        faster: dict[str, list[float]] = {}
        try:
            faster, otherwise = self._faster(trainer, task_of(pl_module))
        except Exception as error:  # the run is done: an error in a copy of a user's net must not end it
            otherwise = f"nothing was measured ({type(error).__name__}: {' '.join(str(error).split()):.200})."
        finally:
            torch.set_num_threads(threads)
            _set_rng_states(states)
            self._batch = None
        told = [
            f"{name} would have been {_middle(ratios):.1f} x as fast here (measured on {self.steps} steps, "
            f"{min(ratios):.1f} to {max(ratios):.1f}){f': {TYPED[name]}' if name in TYPED else ''}"
            for name, ratios in sorted(faster.items(), key=lambda pair: -_middle(pair[1]))
        ]
        self.line = f"{'; '.join(told)}." if told else "" if self.min_steps else otherwise
        if self.line:
            print(f"callbacks.what_if: {self.line}", flush=True)

    def _faster(self, trainer: Trainer, task: Any) -> tuple[dict[str, list[float]], str]:
        """Return each faster setting's speedups per pair of steps, and the text if there are none."""
        reason = _unrepeatable(trainer, task)
        if reason is not None:
            return {}, f"nothing was measured: {reason}."
        own = Step(trainer, task)
        others = {name: own.changed(name) for name in TYPED if own.has(name)}
        if not others:
            return {}, f"the run has all of {', '.join(TYPED)} that there are for it."
        computed = [name for name in others if name != "one thread"]  # does not affect the computation of a step
        if len(computed) > 1:
            together = own
            for name in computed:
                together = together.changed(name)
            others["all of these"] = together
        batch = tree_map(lambda leaf: leaf.to(own.device) if isinstance(leaf, Tensor) else leaf, self._batch)
        found = {name: self._ratios(own, other, batch) for name, other in others.items()}
        return (
            {name: some for name, some in found.items() if min(some) > 1 and _middle(some) >= self.at_least},
            f"nothing of {', '.join(found)} would have been {self.at_least:g} x as fast here (measured on "
            f"{self.steps} steps of each).",
        )

    def _ratios(self, own: "Step", other: "Step", batch: Any) -> list[float]:
        """Return the speedup of `other` in each pair of steps."""
        left, right = own.ready(), other.ready()
        pairs = []
        for number in range(WARMUP + self.steps):
            first, second = (left, right) if number % 2 else (right, left)  # alternates the order
            times = {id(one): one(batch) for one in (first, second)}
            pairs.append(times[id(left)] / times[id(right)])
        return pairs[WARMUP:]


def _middle(ratios: list[float]) -> float:
    return statistics.median(ratios)


def _unrepeatable(trainer: Trainer, task: Any) -> str | None:
    """Return the reason why steps can't run outside the run; None if they can."""
    module = trainer.lightning_module
    compiled = "whole_step" in vars(module) or any(one._compiled_call_impl is not None for one in module.modules())
    if not isinstance(trainer.strategy, SingleDeviceStrategy):
        return f"{type(trainer.strategy).__name__} shares a step out among processes"
    if compiled:
        return "a copy of a compiled net is not compiled"
    if trainer.accumulate_grad_batches != 1:
        return f"trainer.accumulate_grad_batches={trainer.accumulate_grad_batches} makes a step of several batches"
    if getattr(trainer.precision_plugin, "scaler", None) is not None:
        return "the steps of precision=16-mixed depend on what its scaler finds"
    needed = COPIES * sum(weight.nbytes for weight in module.parameters())
    free = psutil.virtual_memory().available
    if trainer.strategy.root_device.type == "cpu" and free < needed:  # a GPU raises an error instead
        return f"copies of the net may take {needed / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB of memory are free"
    hook = task.own_hook()
    if hook is not None:
        return f"{hook} would be called for each step"
    default: bool = task.has_default_step()
    if task is not module or not default:
        return f"{type(module).__name__} makes its steps in its own way"
    if task.objective != task.losses:
        return "the loss is wrapped by what compression does"
    return None


class Step:
    """Settings of a step: number format, memory layout, optimizer kernels and threads."""

    def __init__(self, trainer: Trainer, task: Any) -> None:
        self.trainer, self.task = trainer, task
        self.device = trainer.strategy.root_device
        given = trainer.optimizers[0].defaults
        # the arguments of the run's optimizer; None takes the fastest kernels
        self.kernels: dict[str, Any] | None = {
            name: given[name] for name in ("fused", "foreach") if given.get(name) is not None
        }
        self.format: Callable[[], AbstractContextManager[Any]] = trainer.precision_plugin.forward_context
        self.last, self.threads = False, torch.get_num_threads()

    def has(self, name: str) -> bool:
        """Return whether setting `name` would change this one."""
        net = self.task.net
        if name == "bf16":
            full = str(self.trainer.precision) == "32-true" and not isinstance(
                self.trainer.precision_plugin, MixedPrecision
            )
            return full and (self.device.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False))
        if name == "one thread":
            return self.device.type == "cpu" and self.threads > 1
        if name == "channels_last":
            weights = [module.weight for module in net.modules() if isinstance(module, nn.Conv2d)]
            return any(not weight.is_contiguous(memory_format=torch.channels_last) for weight in weights)
        given = self.task.optimizer_over(net, None).defaults
        return any(given.get(kernel) and not (self.kernels or {}).get(kernel) for kernel in ("fused", "foreach"))

    def changed(self, name: str) -> "Step":
        """Return a copy with setting `name`."""
        other = copy.copy(self)
        if name == "bf16":
            other.format = lambda: torch.autocast(self.device.type, dtype=torch.bfloat16, cache_enabled=False)
        elif name == "channels_last":
            other.last = True
        elif name == "one thread":
            other.threads = 1
        else:
            other.kernels = None
        return other

    def ready(self) -> Callable[[Any], float]:
        """Return a function that makes a step with a batch, on a copy of the net, and returns its seconds."""
        task = self._copied()
        net = task.net
        if self.last:
            net.to(memory_format=torch.channels_last)
        optimizer: Optimizer = self.task.optimizer_over(net, self.kernels)
        value, how = self.trainer.gradient_clip_val, self.trainer.gradient_clip_algorithm
        clip: Any = nn.utils.clip_grad_value_ if how == "value" else nn.utils.clip_grad_norm_

        def step(batch: Any) -> float:
            torch.set_num_threads(self.threads)
            began = self._now()
            x = batch[0]
            if self.last and isinstance(x, Tensor) and x.ndim == 4:
                x = x.contiguous(memory_format=torch.channels_last)
            with torch.enable_grad():
                with self.format():
                    loss = torch.stack(list(task.losses(net(x), batch).values())).sum()
                optimizer.zero_grad()
                loss.backward()
            if value:
                clip(net.parameters(), value)
            optimizer.step()
            return self._now() - began

        return step

    def _copied(self) -> Any:
        """Return a copy of the task, its net and its loss, without copies of Trainer, callbacks and metrics."""
        others = (self.trainer, self.task.meters, *self.trainer.callbacks)  # type: ignore[attr-defined]
        task = copy.deepcopy(self.task, {id(one): one for one in others})
        vars(task)["_trainer"] = self.trainer  # deepcopy of a LightningModule leaves it out
        return task.train()

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()
