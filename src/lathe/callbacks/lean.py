"""Callbacks that cost nothing where they do nothing."""

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


class EachStep:
    """Of a callback that acts at each optimizer step, in the hooks that `each_step` names, and else at none: several
    steps can be made at once.
    """

    each_step: tuple[str, ...] = ("on_train_batch_end",)

    def quiet_steps(self, trainer: Any) -> float:
        """How many of the next steps can do without its other hooks."""
        return math.inf


def skip_empty_hooks(callbacks: Iterable[Callback]) -> None:
    """Hides the per-batch hooks that a callback does not override, in place.

    Lightning calls every hook of every callback under a profiler context, about 2 microseconds each, which adds up to
    half the step of a small net; it passes over a hook that is not callable. Its monitor of learning rates, which names
    all groups anew at each logged step, keeps the names.
    """
    for callback in callbacks:
        if type(callback) is LearningRateMonitor and not (callback.log_momentum or callback.log_weight_decay):
            rates = Rates(callback)
            vars(callback).update(
                _extract_stats=rates, can_note=rates.can_note, note_start=rates.note_start, noted=rates.noted
            )
        for name in EACH_BATCH:
            if getattr(type(callback), name) is getattr(Callback, name) and name not in vars(callback):
                setattr(callback, name, None)


class Rates:
    """What `LearningRateMonitor._extract_stats` returns and notes, by names that are found once."""

    def __init__(self, monitor: LearningRateMonitor) -> None:
        self.monitor = monitor
        self.interval = ""
        self.named: list[tuple[Optimizer, list[str]]] = []
        self.schedulers: list[Any] = []
        self.newest: dict[str, float] = {}  # which `trainer.callback_metrics` lacks

    def __call__(self, trainer: Any, interval: str) -> dict[str, float]:
        found = self.newest = self._read(trainer, interval)
        self.noted(trainer)
        return found

    def can_note(self, trainer: Any) -> bool:
        """Any step: its rates can be noted amid others (`lathe.tasks.loops.notes`)."""
        return True

    def note_start(self, trainer: Any) -> dict[str, float] | None:
        """The rates of a logged step."""
        if self.monitor.logging_interval == "epoch":
            return None
        self.newest = self._read(trainer, "step" if self.monitor.logging_interval is None else "any")
        return self.newest

    def noted(self, trainer: Any) -> None:
        """Hands the newest rates to callbacks."""
        device = trainer.strategy.root_device
        if self.newest:
            rates = {name: torch.as_tensor(rate, device=device) for name, rate in self.newest.items()}
            trainer.callback_metrics.update(rates)
            self.newest = {}

    def _read(self, trainer: Any, interval: str) -> dict[str, float]:
        monitor, found = self.monitor, dict[str, Any]()
        same = interval == self.interval and trainer.lr_scheduler_configs == self.schedulers
        if not same or any(len(optimizer.param_groups) != len(names) for optimizer, names in self.named):
            self._name(trainer, interval)
        for optimizer, names in self.named:
            for group, name in zip(optimizer.param_groups, names, strict=True):
                rate = group["lr"]
                # one that is a tensor goes on changing before its line is written
                found[name] = rate.detach().clone() if isinstance(rate, Tensor) else rate
                monitor.lrs[name].append(found[name])
        return found

    def _name(self, trainer: Any, interval: str) -> None:
        """As Lightning does."""
        monitor = self.monitor
        self.interval, self.schedulers = interval, list(trainer.lr_scheduler_configs)
        names, seen, kinds = monitor._find_names_from_schedulers(self.schedulers)
        others, left = monitor._find_names_from_optimizers(trainer.optimizers, seen, kinds)
        for some in (names, others):
            monitor._remap_keys(some)
        acting = [
            (config.scheduler.optimizer, own)
            for config, own in zip(self.schedulers, names, strict=True)
            if interval in (config.interval, "any")
        ]
        self.named = [*acting, *zip(left, others, strict=True)]
