"""Scheduler configuration: `interval`, `frequency` and `monitor`, as Lightning users write them."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from torch.optim.lr_scheduler import ReduceLROnPlateau

from lathe.config.types import Count, Name
from lathe.config.validation import validated
from lathe.errors import ArgumentError, did_you_mean
from lathe.optim.foreign import check_scheduler

KEYS = ("interval", "frequency", "monitor")


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
