"""Scheduler configuration (`interval`, `frequency`, `monitor`, as Lightning users write them) and construction."""

import inspect
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from lathe.config.types import Count, Name
from lathe.config.validation import validated
from lathe.errors import ArgumentError, UserError, did_you_mean

KEYS = ("interval", "frequency", "monitor")
LENGTH = "total_steps"  # the parameter that gets the run's number of optimizer steps


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
    def mode(self) -> str:
        """Return the `mode` of a scheduler that needs a metric; auto is the metric's direction."""
        return str(getattr(self.factory, "keywords", {}).get("mode", "auto"))

    @property
    def plain(self) -> bool:
        """Return whether it is stepped after every optimizer step, the default."""
        return self.interval in (None, "step") and self.frequency == 1 and not self.waits

    def with_mode(self, mode: str) -> Callable[..., Any]:
        """Return the factory, with `mode` if the scheduler needs a metric."""
        if not self.waits:
            return self.factory
        keys = {**getattr(self.factory, "keywords", {}), "mode": mode}
        return partial(getattr(self.factory, "func", self.factory), **keys)


def plan_of(made: Any) -> Plan:
    """Return the plan of a scheduler's factory, or of Lightning's mapping with the factory as `scheduler`."""
    if not isinstance(made, Mapping):
        return Plan(made)
    for key in made:
        if key not in ("scheduler", *KEYS):
            raise ArgumentError(f"{key}: unknown key next to a scheduler; {did_you_mean(key, KEYS)}")
    return Plan(made["scheduler"], **{key: value for key, value in made.items() if key != "scheduler"})


def check_plan(made: Any, task: Any) -> None:
    """Check the keys of `scheduler` with its signature, and its metric with those that `task` reports."""
    plan = plan_of(made)
    check_scheduler(plan.with_mode("min" if plan.mode == "auto" else plan.mode))
    if not plan.waits:
        if plan.monitor is not None:
            raise ArgumentError(f"monitor={plan.monitor} is read by ReduceLROnPlateau alone: leave it out.")
        return
    if plan.interval == "step":
        raise ArgumentError("interval=step: a metric comes with a validation, so leave interval out.")
    monitor = monitored(plan, task)
    known = [name for name in task.metric_names if name.startswith("val/")]
    if monitor.startswith(("train/", "test/")):
        raise ArgumentError(f"monitor={monitor} is not known after a validation: choose one of {', '.join(known)}.")
    if not task.logs_more and monitor not in task.metric_names:
        raise ArgumentError(f"monitor={monitor}: the task reports no such metric; {did_you_mean(monitor, known)}")
    direction(plan, task)


def monitored(plan: Plan, task: Any) -> str:
    """Return the metric of a scheduler: its own, or the task's."""
    found = task.monitor if plan.monitor in (None, "auto") else plan.monitor
    if not found:
        raise ArgumentError("monitor=auto: nobody knows what this LightningModule logs: name a metric, and its mode.")
    return str(found)


def direction(plan: Plan, task: Any) -> str:
    """Return the `mode` of a scheduler that needs a metric: its own, or that of the task's metric."""
    monitor = monitored(plan, task)
    if plan.mode != "auto":
        return plan.mode
    if monitor not in task.metric_names:
        raise ArgumentError(f"mode=auto knows the task's own metrics, and not {monitor}: set mode to max or min.")
    return "min" if monitor.rpartition("/")[2] in task.minimised else "max"


def wants_length(factory: Callable[..., Any]) -> bool:
    """Return whether a scheduler, or one that it contains, has a parameter `total_steps`."""
    lists = [value for value in getattr(factory, "keywords", {}).values() if isinstance(value, list)]
    inner = [item for value in lists for item in value if _is_scheduler(item)]
    return LENGTH in inspect.signature(factory).parameters or any(map(wants_length, inner))


def build_scheduler(factory: Callable[..., Any], optimizer: Optimizer, total_steps: int | None) -> LRScheduler:
    """Return the scheduler that `factory` makes; it gets `total_steps` if it `wants_length`.

    Raises ArgumentError if it refuses its arguments, is not a scheduler, or gives groups of different rates one rate.
    """
    name, before = _name(factory), _ratios(optimizer)
    try:
        made = _made(factory, optimizer, total_steps)
    except UserError:
        raise
    except Exception as error:
        raise _refused(factory, error) from error
    if not isinstance(made, LRScheduler):
        raise ArgumentError(f"_target_={name}: expected a scheduler such as torch.optim.lr_scheduler.StepLR.")
    if any(abs(one - other) > 1e-6 for one, other in zip(before, _ratios(optimizer), strict=True)):
        raise ArgumentError(
            f"_target_={name} gives all groups one rate, and theirs differ (layer_decay, Muon): choose another."
        )
    return made


def _made(factory: Any, optimizer: Optimizer, total_steps: int | None) -> Any:
    function, keys = _arguments(factory)
    for key, value in keys.items():
        if isinstance(value, list):  # SequentialLR's and ChainedScheduler's schedulers, in order
            keys[key] = [_made(item, optimizer, total_steps) if _is_scheduler(item) else item for item in value]
    parameters = list(inspect.signature(function).parameters)
    if LENGTH in parameters:
        keys[LENGTH] = total_steps
    named = "optimizer" in parameters[1:]  # ChainedScheduler takes it second
    return function(optimizer=optimizer, **keys) if named else function(optimizer, **keys)


def _arguments(factory: Any) -> tuple[Any, dict[str, Any]]:
    """Return a scheduler's class or function and its keys; raise ArgumentError for a key that it lacks."""
    function, given = getattr(factory, "func", factory), dict(getattr(factory, "keywords", {}))
    parameters = inspect.signature(function).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    for key in given:
        if key not in parameters and not takes_any:
            names = [name for name in parameters if name != "optimizer"]
            hint = did_you_mean(key, names, f"its keys are {', '.join(names)}.")
            raise ArgumentError(f"{key} is not a key of {_name(factory)}: {hint}")
    if LENGTH in given:
        raise ArgumentError(f"{LENGTH}={given[LENGTH]} is known from the run: leave it out.")
    return function, given


def _is_scheduler(item: Any) -> bool:
    return isinstance(item, partial) or (inspect.isclass(item) and issubclass(item, LRScheduler))


def _ratios(optimizer: Optimizer) -> list[float]:
    """Return each group's learning rate as a share of the largest."""
    rates = [float(group["lr"]) for group in optimizer.param_groups]
    largest = max(rates)
    return [rate / largest for rate in rates] if largest else [1.0 for _ in rates]


def check_scheduler(factory: Any) -> None:
    """Check a scheduler's class or function and its keys; try torch's own schedulers for a few steps."""
    function, name = getattr(factory, "func", factory), _name(factory)
    if not callable(function) or (inspect.isclass(function) and not issubclass(function, LRScheduler)):
        raise ArgumentError(f"_target_={name}: expected a scheduler such as torch.optim.lr_scheduler.StepLR.")
    _arguments(factory)
    if not function.__module__.startswith("torch."):
        return
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1, momentum=0.9)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scheduler: Any = build_scheduler(factory, optimizer, 1000)
        try:
            for _ in range(3):
                optimizer.step()
                scheduler.step(1.0) if isinstance(scheduler, ReduceLROnPlateau) else scheduler.step()
        except Exception as error:
            raise _refused(factory, error) from error


def counted_in_steps(factory: Any) -> str | None:
    """Return a note that a scheduler of torch counts steps, not epochs; None for other schedulers."""
    if wants_length(factory) or not getattr(factory, "func", factory).__module__.startswith("torch."):
        return None
    return (
        f"{_name(factory)} is stepped after every optimizer step: {_typed(factory)} counts steps, not epochs "
        "(interval=epoch counts those)."
    )


def _refused(factory: Any, error: Exception) -> ArgumentError:
    reason = " ".join(f"{type(error).__name__}: {error}".split())
    return ArgumentError(f"_target_={_name(factory)} refused {_typed(factory)} ({reason}).")


def _name(factory: Any) -> str:
    function = getattr(factory, "func", factory)
    return str(getattr(function, "__name__", function))


def _typed(factory: Any) -> str:
    keys = {
        key: [_name(item) if _is_scheduler(item) else item for item in value] if isinstance(value, list) else value
        for key, value in getattr(factory, "keywords", {}).items()
    }
    return ", ".join(f"{key}={value}" for key, value in keys.items()) or "its defaults"
