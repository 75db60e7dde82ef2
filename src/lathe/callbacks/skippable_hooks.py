"""Per-batch hooks that callbacks do not need: opt-in to several steps per call, and hooks that are not overridden."""

import math
from collections.abc import Iterable
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback, LearningRateMonitor
from torch import Tensor
from torch.optim import Optimizer

EACH_BATCH = (
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
    "on_validation_batch_start",
    "on_validation_batch_end",
    "on_test_batch_start",
    "on_test_batch_end",
)


class SkippableHooks:
    """Mixin for a callback that does not need all of its per-batch hooks at every step.

    Steps run one by one with a callback that overrides a per-batch hook and does not define `skippable_steps`; it need
    not derive from this class. A subclass that overrides a hook again has to define it again. `skippable_steps = None`
    states that every step is needed. `every_step` names the hooks that run at every step nevertheless:
    on_train_batch_start, on_before_backward, on_before_optimizer_step or on_train_batch_end.

    These methods are optional, and not defined here:

    - `on_skipped_steps(trainer, pl_module, batches, waited)` is called after a group of steps with its batches and the
      seconds that it waited for them.
    - `can_defer_log(trainer) -> bool`: the next step that the callback needs can run inside a group, as the callback
      only logs a row at it. `deferred_row_at_start(trainer)`, before that step's forward pass, or
      `deferred_row(trainer)`, after its update, returns the row or None. `complete_deferred_rows(trainer)` is called
      after the group, before its rows are written. For one process.
    - `on_whole_step(trainer, pl_module, loss)` replaces the hooks inside a step that is one compiled function
      (`compile.scope=step`).
    """

    every_step: tuple[str, ...] = ("on_train_batch_end",)

    def skippable_steps(self, trainer: Any) -> float:
        """Count the next steps that do not need the hooks outside `every_step`."""
        return math.inf


def skip_empty_hooks(callbacks: Iterable[Callback]) -> None:
    """Hide the per-batch hooks that a callback does not override, in place.

    Lightning calls every hook of every callback in a profiler context, about 2 us each, which adds up to half the step
    of a small net; it skips a hook that is not callable. `LearningRateMonitor` gets cached names of parameter groups,
    which it would find at each logged step.
    """
    for callback in callbacks:
        if type(callback) is LearningRateMonitor and not (callback.log_momentum or callback.log_weight_decay):
            rates = LearningRates(callback)
            vars(callback).update(
                _extract_stats=rates,
                can_defer_log=rates.can_defer_log,
                deferred_row_at_start=rates.deferred_row_at_start,
                complete_deferred_rows=rates.update_callback_metrics,
            )
        for name in EACH_BATCH:
            if getattr(type(callback), name) is getattr(Callback, name) and name not in vars(callback):
                setattr(callback, name, None)


class LearningRates:
    """`LearningRateMonitor._extract_stats` with cached names of parameter groups and deferred rows."""

    def __init__(self, monitor: LearningRateMonitor) -> None:
        self.monitor = monitor
        self.interval = ""
        self.named: list[tuple[Optimizer, list[str]]] = []
        self.schedulers: list[Any] = []
        self.newest: dict[str, float] = {}  # not in `trainer.callback_metrics` yet

    def __call__(self, trainer: Any, interval: str) -> dict[str, float]:
        rates = self.newest = self._read(trainer, interval)
        self.update_callback_metrics(trainer)
        return rates

    def can_defer_log(self, trainer: Any) -> bool:
        """Return True: the row of any step can be deferred (`lathe.callbacks.SkippableHooks`)."""
        return True

    def deferred_row_at_start(self, trainer: Any) -> dict[str, float] | None:
        """Return the rates of a logged step."""
        if self.monitor.logging_interval == "epoch":
            return None
        self.newest = self._read(trainer, "step" if self.monitor.logging_interval is None else "any")
        return self.newest

    def update_callback_metrics(self, trainer: Any) -> None:
        """Write the newest rates to `trainer.callback_metrics`."""
        device = trainer.strategy.root_device
        if self.newest:
            rates = {name: torch.as_tensor(rate, device=device) for name, rate in self.newest.items()}
            trainer.callback_metrics.update(rates)
            self.newest = {}

    def _read(self, trainer: Any, interval: str) -> dict[str, float]:
        monitor, rates = self.monitor, dict[str, Any]()
        same = interval == self.interval and trainer.lr_scheduler_configs == self.schedulers
        if not same or any(len(optimizer.param_groups) != len(names) for optimizer, names in self.named):
            self._find_names(trainer, interval)
        for optimizer, names in self.named:
            for group, name in zip(optimizer.param_groups, names, strict=True):
                rate = group["lr"]
                # a tensor changes in place before its row is written
                rates[name] = rate.detach().clone() if isinstance(rate, Tensor) else rate
                monitor.lrs[name].append(rates[name])
        return rates

    def _find_names(self, trainer: Any, interval: str) -> None:
        """Find the names of parameter groups as Lightning does."""
        monitor = self.monitor
        self.interval, self.schedulers = interval, list(trainer.lr_scheduler_configs)
        names, seen, kinds = monitor._find_names_from_schedulers(self.schedulers)
        others, left = monitor._find_names_from_optimizers(trainer.optimizers, seen, kinds)
        for group_names in (names, others):
            monitor._remap_keys(group_names)
        acting = [
            (config.scheduler.optimizer, own)
            for config, own in zip(self.schedulers, names, strict=True)
            if interval in (config.interval, "any")
        ]
        self.named = [*acting, *zip(left, others, strict=True)]
