"""Schedulers of any class, stepped after optimizer steps, after epochs, or with a metric; and the optimizer for them.

`interval`, `frequency` and `monitor` are as Lightning's users write them.
"""

import inspect
import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, SingleDeviceStrategy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ChainedScheduler, LRScheduler, ReduceLROnPlateau

from lathe.config.types import Count, Name
from lathe.config.validation import validated
from lathe.errors import ArgumentError, UserError, did_you_mean, under
from lathe.optim.build import factory_of, with_kernels

KEY = "trainer.fused_optimizer=auto"
KEYS = ("interval", "frequency", "monitor")
LENGTH = "total_steps"  # the parameter that gets the run's number of optimizer steps
NEVER = 2**62  # as a frequency: Lightning leaves a scheduler to `SchedulerCallback`


@validated
@dataclass(frozen=True)
class Plan:
    """A scheduler's `factory`, stepped after every `frequency`-th optimizer step or epoch.

    A scheduler of a metric is stepped after every `frequency`-th validation, with `monitor`. None is the default: the
    task's metric; steps.
    """

    factory: Callable[..., Any]
    interval: Literal["step", "epoch"] | None = None
    frequency: Count = 1
    monitor: Name | None = None

    @property
    def waits(self) -> bool:
        """Return whether the scheduler needs a metric."""
        function = getattr(self.factory, "func", self.factory)
        return inspect.isclass(function) and issubclass(function, ReduceLROnPlateau)

    @property
    def plain(self) -> bool:
        """Return whether it is stepped after every optimizer step, the default."""
        return self.interval in (None, "step") and self.frequency == 1 and not self.waits

    @property
    def mode(self) -> str:
        """Return the `mode` of a scheduler that needs a metric; auto is the metric's direction."""
        return str(getattr(self.factory, "keywords", {}).get("mode", "auto"))

    def with_mode(self, mode: str) -> Callable[..., Any]:
        """Return the factory, with `mode` if the scheduler needs a metric."""
        if not self.waits:
            return self.factory
        keys = {**getattr(self.factory, "keywords", {}), "mode": mode}
        return partial(getattr(self.factory, "func", self.factory), **keys)

    def metric(self, task: Any) -> tuple[str, str]:
        """Return the monitor and the mode of a scheduler that needs a metric: its own, or the task's."""
        monitor = task.monitor if self.monitor in (None, "auto") else self.monitor
        if not monitor:
            raise ArgumentError("monitor=auto: a LightningModule declares no metrics. Name one, and set mode.")
        if self.mode != "auto":
            return str(monitor), self.mode
        if monitor not in task.metric_names:
            raise ArgumentError(f"mode=auto knows the task's own metrics, and not {monitor}: set mode to max or min.")
        return str(monitor), "min" if monitor.rpartition("/")[2] in task.minimised else "max"


def plan_of(scheduler: Any) -> Plan:
    """Return the plan of a scheduler's factory, or of Lightning's mapping with the factory as `scheduler`."""
    if not isinstance(scheduler, Mapping):
        return Plan(scheduler)
    for key in scheduler:
        if key not in ("scheduler", *KEYS):
            raise ArgumentError(f"{key}: unknown key next to a scheduler; {did_you_mean(key, KEYS)}")
    return Plan(scheduler["scheduler"], **{key: value for key, value in scheduler.items() if key != "scheduler"})


def check_plan(node: Any, task: Any) -> None:
    """Check a scheduler's keys and metric; try torch's own schedulers for a few steps."""
    plan = plan_of(node)
    factory: Any = plan.with_mode("min" if plan.mode == "auto" else plan.mode)
    function = getattr(factory, "func", factory)
    if not callable(function) or (inspect.isclass(function) and not issubclass(function, LRScheduler)):
        raise _no_scheduler(factory)
    _arguments(factory)
    if function.__module__.startswith("torch."):
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1, momentum=0.9)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            scheduler: Any = build_scheduler(factory, optimizer, 1000)
            try:
                for _ in range(3):
                    optimizer.step()
                    scheduler.step(1.0) if plan.waits else scheduler.step()
            except Exception as error:
                raise _refused(factory, error) from error
    if not plan.waits:
        if plan.monitor is not None:
            raise ArgumentError(f"monitor={plan.monitor} is read by ReduceLROnPlateau alone: leave it out.")
        return
    if plan.interval == "step":
        raise ArgumentError("interval=step: a metric comes with a validation, so leave interval out.")
    monitor = task.monitor if plan.monitor in (None, "auto") else plan.monitor
    known = [name for name in task.metric_names if not name.startswith(("train/", "test/"))]
    if monitor.startswith(("train/", "test/")) or (monitor and not task.logs_more and monitor not in known):
        raise ArgumentError(f"monitor={monitor}: a validation reports no such metric; {did_you_mean(monitor, known)}")
    plan.metric(task)


def build_scheduler(factory: Callable[..., Any], optimizer: Optimizer, total_steps: int | None) -> LRScheduler:
    """Return the scheduler that `factory` makes; it gets `total_steps` if it `wants_length`."""

    def ratios() -> list[float]:
        rates = [float(group["lr"]) for group in optimizer.param_groups]
        return [rate / max(rates) for rate in rates] if any(rates) else []

    def make(factory: Any) -> Any:
        function, keys = _arguments(factory)
        for key, value in keys.items():
            if isinstance(value, list):  # SequentialLR's and ChainedScheduler's schedulers, in order
                keys[key] = [make(item) if _is_scheduler(item) else item for item in value]
        parameters = list(inspect.signature(function).parameters)
        if LENGTH in parameters:
            keys[LENGTH] = total_steps
        named = "optimizer" in parameters[1:]  # ChainedScheduler takes it second
        return function(optimizer=optimizer, **keys) if named else function(optimizer, **keys)

    before = ratios()
    try:
        scheduler = make(factory)
    except UserError:
        raise
    except Exception as error:
        raise _refused(factory, error) from error
    if not isinstance(scheduler, LRScheduler):
        raise _no_scheduler(factory)
    after = ratios()  # none of a warm-up that begins at zero
    if before and after and any(abs(old - new) > 1e-6 for old, new in zip(before, after, strict=True)):
        raise ArgumentError(
            f"_target_={_name(factory)} gives all groups one rate, and theirs differ (layer_decay, Muon): choose "
            "another."
        )
    return scheduler


def wants_length(factory: Callable[..., Any]) -> bool:
    """Return whether a scheduler, or one that it contains, has a parameter `total_steps`."""
    lists = [value for value in getattr(factory, "keywords", {}).values() if isinstance(value, list)]
    inner = [item for value in lists for item in value if _is_scheduler(item)]
    return LENGTH in inspect.signature(factory).parameters or any(map(wants_length, inner))


def _arguments(factory: Any) -> tuple[Any, dict[str, Any]]:
    """Return a scheduler's class or function and its keys; raise ArgumentError for a key that it lacks."""
    function, keys = getattr(factory, "func", factory), dict(getattr(factory, "keywords", {}))
    parameters = inspect.signature(function).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    for key in keys:
        if key not in parameters and not takes_any:
            names = [name for name in parameters if name != "optimizer"]
            hint = did_you_mean(key, names, f"its keys are {', '.join(names)}.")
            raise ArgumentError(f"{key} is not a key of {_name(factory)}: {hint}")
    if LENGTH in keys:
        raise ArgumentError(f"{LENGTH}={keys[LENGTH]} is known from the run: leave it out.")
    return function, keys


def _is_scheduler(item: Any) -> bool:
    return isinstance(item, partial) or (inspect.isclass(item) and issubclass(item, LRScheduler))


def _name(factory: Any) -> str:
    function = getattr(factory, "func", factory)
    return str(getattr(function, "__name__", function))


def _typed(factory: Any) -> str:
    keys = {
        key: [_name(item) if _is_scheduler(item) else item for item in value] if isinstance(value, list) else value
        for key, value in getattr(factory, "keywords", {}).items()
    }
    return ", ".join(f"{key}={value}" for key, value in keys.items()) or "its defaults"


def _refused(factory: Any, error: Exception) -> ArgumentError:
    reason = " ".join(f"{type(error).__name__}: {error}".split())
    return ArgumentError(f"_target_={_name(factory)} refused {_typed(factory)} ({reason}).")


def _no_scheduler(factory: Any) -> ArgumentError:
    return ArgumentError(f"_target_={_name(factory)}: expected a scheduler such as torch.optim.lr_scheduler.StepLR.")


def make_optimizers(task: Any, make: Any, scheduled: Any) -> Any:
    """Return what `configure_optimizers` of a task returns, from the factories of its optimizer and scheduler."""
    if make is None:
        return None
    with under("optimizer"):
        factory = factory_of(make)
        optimizer = (_with_fused(task, factory) if task.fused_optimizer else factory)(task.net)
    trainer = getattr(task, "_trainer", None)  # None: not attached to a Trainer yet
    if trainer is not None and getattr(trainer.precision_plugin, "scaler", None) is None:
        vars(optimizer)["_step_supports_amp_scaling"] = False  # else Lightning refuses to clip, though nothing scales
    if scheduled is None:
        return optimizer
    with under("scheduler"):
        return {"optimizer": optimizer, "lr_scheduler": make_scheduler(scheduled, optimizer, task)}


def _with_fused(task: Any, factory: Any) -> Any:
    """Return `factory` with the kernels of `trainer.fused_optimizer=auto`."""
    trainer = task.trainer
    whole = isinstance(trainer.strategy, (SingleDeviceStrategy, DDPStrategy))
    if not whole or isinstance(trainer.strategy, DeepSpeedStrategy):
        line = f": no effect under {type(trainer.strategy).__name__}."
    elif "whole_step" in vars(task.driven):
        line = ": no effect, as compile.scope=step compiles the optimizer's step."
    else:
        scaled = getattr(trainer.precision_plugin, "scaler", None) is not None
        factory, line = with_kernels(factory, task.net.parameters(), scaled and bool(trainer.gradient_clip_val))
    if trainer.is_global_zero:
        print(f"{KEY}{line}", flush=True)
    return factory


def make_scheduler(factory_or_mapping: Any, optimizer: Optimizer, task: Any) -> dict[str, Any]:
    """Return Lightning's mapping of the scheduler that `made` makes, planned for the run's steps or epochs, or for each
    of the equal parts of a run that repeats its schedule (`task.schedule_repeats`).
    """
    trainer, plan = task.trainer, plan_of(factory_or_mapping)
    if task.schedule_repeats > 1 and not plan.plain:
        raise UserError(
            "compression.lottery repeats a schedule of optimizer steps: leave out scheduler.interval and "
            "scheduler.frequency, and use no scheduler with a monitor."
        )
    monitor, mode = plan.metric(task) if plan.waits else ("", "")
    factory = plan.with_mode(mode)
    total = None
    if wants_length(factory) and plan.interval == "epoch":
        if trainer.max_epochs is None or trainer.max_epochs < 0:
            raise UserError("scheduler.interval=epoch requires trainer.max_epochs.")
        total = max(trainer.max_epochs // plan.frequency, 1)
    elif wants_length(factory):
        steps = trainer.estimated_stepping_batches
        if not 0 <= steps < math.inf:
            raise UserError(
                f"The scheduler cannot plan a run of {steps} steps: set trainer.max_epochs or trainer.max_steps, and "
                "trainer.limit_train_batches above 0."
            )
        total = int(steps) // task.schedule_repeats // plan.frequency
    scheduler = build_scheduler(factory, optimizer, total)
    if isinstance(scheduler, ReduceLROnPlateau) and not plan.waits:
        raise ArgumentError("_target_ returns a ReduceLROnPlateau: use that class itself, with its monitor.")
    in_torch = getattr(factory, "func", factory).__module__.startswith("torch.")
    if plan.interval is None and not plan.waits and total is None and in_torch and trainer.is_global_zero:
        print(
            f"{_name(factory)} is stepped after every optimizer step: {_typed(factory)} counts steps, not epochs "
            "(interval=epoch counts those)."
        )
    if plan.plain:
        return {"scheduler": scheduler, "interval": "step"}
    trainer.callbacks.insert(0, SchedulerCallback(scheduler, plan, monitor))
    return {"scheduler": scheduler, "interval": "step", "frequency": NEVER, "reduce_on_plateau": False}


class SchedulerCallback(Callback):
    """Step a scheduler that counts epochs, every n-th optimizer step, or validations.

    Lightning steps after the checkpoint of an epoch's end, and after that of a validation: a run resumed from either
    would miss the step, or take it twice. Here the state determines how many steps are due, and all ranks use the
    metric of rank 0.
    """

    every_step = ("on_train_batch_end",)

    def __init__(self, scheduler: LRScheduler, plan: Plan, monitor: str) -> None:
        self.scheduler, self.plan, self.monitor = scheduler, plan, monitor

    def skippable_steps(self, trainer: Trainer) -> float:
        """Return inf: the hook that acts at each step is in `every_step`."""
        return math.inf

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.plan.interval == "epoch" and not self.plan.waits:
            self._catch_up(trainer.current_epoch // self.plan.frequency)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if self.plan.interval in (None, "step") and not self.plan.waits:
            self._catch_up(trainer.global_step // self.plan.frequency)

    def _catch_up(self, due: int) -> None:
        chained = self.scheduler
        while isinstance(chained, ChainedScheduler):  # it has no counter
            chained = chained._schedulers[0]
        while chained.last_epoch < due:
            before = chained.last_epoch
            with warnings.catch_warnings():  # the optimizer of a resumed run has not stepped yet
                warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
                self.scheduler.step()
            if chained.last_epoch <= before:
                break  # a user's scheduler that counts otherwise takes one step at a time

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self.plan.waits or trainer.sanity_checking or trainer.state.fn != "fit":
            return
        state: Any = self.scheduler  # its attributes are its state in checkpoints
        if getattr(state, "validated_step", None) == trainer.global_step:
            return  # a resumed run validates again
        value = trainer.callback_metrics.get(self.monitor)
        if value is None:
            hint = did_you_mean(self.monitor, list(trainer.callback_metrics))
            raise UserError(f"scheduler.monitor={self.monitor}: no validation reports it; {hint}")
        state.validated_step = trainer.global_step
        state.validations = getattr(state, "validations", 0) + 1
        if state.validations % self.plan.frequency == 0:
            state.step(trainer.strategy.broadcast(float(value)))
