"""Benchmark faster settings after training (bf16, channels_last, fused optimizer)."""

import copy
import math
import statistics
import time
from collections.abc import Callable
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
from lathe.compression.modes import is_compiled
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
        middle = {name: statistics.median(ratios) for name, ratios in faster.items()}
        advice = [
            f"{name} would have been {middle[name]:.1f} x as fast here (measured on {self.steps} steps, "
            f"{min(ratios):.1f} to {max(ratios):.1f}){f': {TYPED[name]}' if name in TYPED else ''}"
            for name, ratios in sorted(faster.items(), key=lambda pair: -middle[pair[0]])
        ]
        self.line = f"{'; '.join(advice)}." if advice else "" if self.min_steps else otherwise
        if self.line:
            print(f"callbacks.what_if: {self.line}", flush=True)

    def _faster(self, trainer: Trainer, task: Any) -> tuple[dict[str, list[float]], str]:
        """Return each faster setting's speedups per pair of steps, and the text if there are none."""
        reason = _unrepeatable(trainer, task)
        if reason is not None:
            return {}, f"nothing was measured: {reason}."
        others = _changes(trainer, task)
        if not others:
            return {}, f"the run has all of {', '.join(TYPED)} that there are for it."
        computed = [change for name, change in others.items() if name != "one thread"]
        if len(computed) > 1:
            others["all of these"] = {key: value for change in computed for key, value in change.items()}
        device = trainer.strategy.root_device
        batch = tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, self._batch)
        ratios = {name: self._ratios(trainer, task, change, batch) for name, change in others.items()}
        faster = {name: r for name, r in ratios.items() if min(r) > 1 and statistics.median(r) >= self.at_least}
        return faster, (
            f"nothing of {', '.join(ratios)} would have been {self.at_least:g} x as fast here (measured on "
            f"{self.steps} steps of each)."
        )

    def _ratios(self, trainer: Trainer, task: Any, change: dict[str, Any], batch: Any) -> list[float]:
        """Return the speedup by `change`, arguments of `make_step`, in each pair of steps."""
        own, other = make_step(trainer, task), make_step(trainer, task, **change)
        pairs, threads = [], torch.get_num_threads()
        for number in range(WARMUP + self.steps):
            first, second = (own, other) if number % 2 else (other, own)  # alternates the order
            times = {id(step): step(batch) for step in (first, second)}
            pairs.append(times[id(own)] / times[id(other)])
        torch.set_num_threads(threads)
        return pairs[WARMUP:]


def _unrepeatable(trainer: Trainer, task: Any) -> str | None:
    """Return the reason why steps can't run outside the run; None if they can."""
    module = trainer.lightning_module
    if not isinstance(trainer.strategy, SingleDeviceStrategy):
        return f"{type(trainer.strategy).__name__} shares a step out among processes"
    if "whole_step" in vars(module) or is_compiled(module):
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


def _changes(trainer: Trainer, task: Any) -> dict[str, dict[str, Any]]:
    """Return the settings that the run does not have, by name, as arguments of `make_step`."""
    changes: dict[str, dict[str, Any]] = {}
    device, plugin = trainer.strategy.root_device, trainer.precision_plugin
    full = str(trainer.precision) == "32-true" and not isinstance(plugin, MixedPrecision)
    if full and (device.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False)):
        changes["bf16"] = {"bf16": True}
    weights = [module.weight for module in task.net.modules() if isinstance(module, nn.Conv2d)]
    if any(not weight.is_contiguous(memory_format=torch.channels_last) for weight in weights):
        changes["channels_last"] = {"last": True}
    defaults, fastest = trainer.optimizers[0].defaults, task.optimizer_over(task.net, None).defaults
    if any(fastest.get(kernel) and not defaults.get(kernel) for kernel in ("fused", "foreach")):
        changes["fused optimizer"] = {"fused": True}
    if device.type == "cpu" and torch.get_num_threads() > 1:
        changes["one thread"] = {"threads": 1}
    return changes


def make_step(
    trainer: Trainer, task: Any, bf16: bool = False, last: bool = False, fused: bool = False, threads: int | None = None
) -> Callable[[Any], float]:
    """Return a function that makes a step with a batch, on a copy of the net, and returns its seconds.

    The settings are the run's but for bfloat16, `last` for channels last, the fastest kernels of the optimizer
    (`fused`), and the number of `threads`.
    """
    device, defaults = trainer.strategy.root_device, trainer.optimizers[0].defaults
    kernels = {name: defaults[name] for name in ("fused", "foreach") if defaults.get(name) is not None}
    # without copies of Trainer, callbacks and metrics
    others = (trainer, task.meters, *trainer.callbacks)  # type: ignore[attr-defined]
    copied = copy.deepcopy(task, {id(item): item for item in others}).train()
    vars(copied)["_trainer"] = trainer  # deepcopy of a LightningModule leaves it out
    net = copied.net.to(memory_format=torch.channels_last) if last else copied.net
    optimizer: Optimizer = task.optimizer_over(net, None if fused else kernels)
    count, value = threads or torch.get_num_threads(), trainer.gradient_clip_val
    clip: Any = nn.utils.clip_grad_value_ if trainer.gradient_clip_algorithm == "value" else nn.utils.clip_grad_norm_

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    def step(batch: Any) -> float:
        torch.set_num_threads(count)
        began, x = now(), batch[0]
        if last and isinstance(x, Tensor) and x.ndim == 4:
            x = x.contiguous(memory_format=torch.channels_last)
        autocast = torch.autocast(device.type, dtype=torch.bfloat16, cache_enabled=False)
        with torch.enable_grad():
            with autocast if bf16 else trainer.precision_plugin.forward_context():
                loss = torch.stack(list(copied.losses(net(x), batch).values())).sum()
            optimizer.zero_grad()
            loss.backward()
        if value:
            clip(net.parameters(), value)
        optimizer.step()
        return now() - began

    return step
