"""What a run left lying: number formats, layouts and kernels that would have been faster here, by measurement."""

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

WARMUP = 2  # steps of each that are not timed
COPIES = 10  # times the weights: two nets, their gradients, two states of each in their optimizers, and room
# what to type for each
TYPED = {
    "bf16": "precision=bf16-mixed",
    "channels_last": "trainer.channels_last=true",
    "fused optimizer": "trainer.fused_optimizer=auto",
    "one thread": "launch.threads=1",  # several wait for each other where the machine does other things as well
}


class WhatIf(Callback):
    """After training, time steps of copies of the net in the run's own settings and in others, one of each in turn, and
    print those that would have been faster: bfloat16, channels last, a fused optimizer, all of these together, and one
    thread of a CPU.

    The batch is one that the run trained with. A timed step is forward, loss, backward, clipping and update, without
    the loop around them. Weights, metrics, checkpoints and random numbers of the run are what they would be without:
    net and loss are copied with what they hold, though not what they keep in their classes or in files. A step can't be
    repeated outside the run with several devices, a compiled net, accumulated gradients, float16 with its scaler, a
    loss that compression has wrapped, a hook on the net or a `training_step` of the user's own.

    Args:
        steps: that are timed of each.
        at_least: how many times as fast something has to be to be worth a line.
        min_steps: optimizer steps that a fit must have made to be measured. With 0 there is a line for every fit, also
            for one that could not be measured, or whose settings were the quickest.
    """

    @validated
    def __init__(
        self,
        steps: Annotated[int, Field(ge=2)] = 5,
        at_least: Annotated[float, Field(ge=1)] = 1.1,
        min_steps: NonNegativeInt = 0,
    ) -> None:
        self.steps, self.at_least, self.min_steps = steps, at_least, min_steps
        self.line = ""  # what was said
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
            # in the machine's memory: the device's may be full
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
        except Exception as error:  # the run is done: nothing that a copy of a user's net does may take its end away
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
        """What was faster in each pair of steps, with how many times as fast; what to say where there is nothing."""
        reason = _unrepeatable(trainer, task)
        if reason is not None:
            return {}, f"nothing was measured: {reason}."
        own = Step(trainer, task)
        others = {name: own.changed(name) for name in TYPED if own.has(name)}
        if not others:
            return {}, f"the run has all of {', '.join(TYPED)} that there are for it."
        computed = [name for name in others if name != "one thread"]  # which is for what else the machine does
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
        """How many times as fast `other` was in each pair of steps."""
        left, right = own.ready(), other.ready()
        pairs = []
        for number in range(WARMUP + self.steps):
            first, second = (left, right) if number % 2 else (right, left)  # neither always runs behind the other
            times = {id(one): one(batch) for one in (first, second)}
            pairs.append(times[id(left)] / times[id(right)])
        return pairs[WARMUP:]


def _middle(ratios: list[float]) -> float:
    return statistics.median(ratios)


def _unrepeatable(trainer: Trainer, task: Any) -> str | None:
    """Why steps can't be made outside the run; None where they can."""
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
    if trainer.strategy.root_device.type == "cpu" and free < needed:  # a GPU says so itself, and nobody is ended
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
    """A way to make steps: a number format, a layout, and an optimizer."""

    def __init__(self, trainer: Trainer, task: Any) -> None:
        self.trainer, self.task = trainer, task
        self.device = trainer.strategy.root_device
        given = trainer.optimizers[0].defaults
        # what the run's optimizer was made with; None asks for the quickest that there is
        self.kernels: dict[str, Any] | None = {
            name: given[name] for name in ("fused", "foreach") if given.get(name) is not None
        }
        self.format: Callable[[], AbstractContextManager[Any]] = trainer.precision_plugin.forward_context
        self.last, self.threads = False, torch.get_num_threads()

    def has(self, name: str) -> bool:
        """Whether there is such a change of this one."""
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
        """The same with another format, layout or optimizer."""
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
        """A function that makes a step with a batch, on a copy of the net, and returns its seconds."""
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
        """The task with a net and a loss of its own, whose state moves on with each step. The Trainer, its callbacks
        and metric objects are no part of a step, and not copied."""
        others = (self.trainer, self.task.meters, *self.trainer.callbacks)  # type: ignore[attr-defined]
        task = copy.deepcopy(self.task, {id(one): one for one in others})
        vars(task)["_trainer"] = self.trainer  # which a LightningModule leaves out
        return task.train()

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()
