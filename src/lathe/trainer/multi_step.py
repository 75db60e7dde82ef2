"""Several optimizer steps per loop call, where no hook needs to see the steps between.

Lightning 2.6 spends about 0.25 ms around a step. A group of steps runs only forward, backward, update and the hooks in
`every_step`. Callbacks and tasks opt in with `skippable_steps` (`lathe.callbacks.SkippableHooks` documents it). A group
ends before a step that a skipped hook needs, before a validation or the end of an epoch, and after 0.1 s, so that the
progress bar stays live. A logged step does not end a group if all that log it can defer their rows, which are written
after the group. Every other step is Lightning's own; `lathe.trainer.trainer` has the table of who makes which step.
"""

import math
from collections.abc import Callable, Iterable
from time import perf_counter
from typing import Any

from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import DeviceStatsMonitor, LearningRateMonitor
from lightning.pytorch.loops.fetchers import _DataFetcher, _PrefetchDataFetcher
from lightning.pytorch.plugins import MixedPrecision, Precision
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.strategies import DDPStrategy, Strategy
from lightning.pytorch.trainer import call
from lightning.pytorch.utilities.combined_loader import _Sequential
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor
from torch.optim import LBFGS, Optimizer
from torch.optim.optimizer import _global_optimizer_pre_hooks

from lathe.data.steps import steps_before
from lathe.data.transfer import HOOKS as TRANSFER_HOOKS
from lathe.optim.short import short_schedule, short_step, short_zero_grad

# hooks that `every_step` may name
EVERY_STEP = ("on_train_batch_start", "on_before_backward", "on_before_optimizer_step", "on_train_batch_end")
HOOKS = (*EVERY_STEP, "on_before_zero_grad", "on_after_backward")  # called for each training batch
MAX_STEPS = 64  # of a group, which keeps its batches
MAX_SECONDS = 0.1  # of groups in a row
LOGGED_STEPS_ONLY = (LearningRateMonitor, DeviceStatsMonitor)  # Lightning's own callbacks that act at logged steps
STEP_METHODS = ("training_step", "losses", "reduce", "scored")  # what a task's `standard_step` speaks for
# A module, strategy or precision that overrides one of these makes its steps in Lightning's way.
MODULE_STEP = ("backward", "optimizer_step", "optimizer_zero_grad", "configure_gradient_clipping")
STRATEGY_STEP = ("training_step", "backward", "pre_backward", "post_backward", "optimizer_step", "on_train_batch_start")
PRECISION_STEP = ("pre_backward", "backward", "post_backward", "optimizer_step", "_after_closure", "_wrap_closure")

Limit = Callable[[Any], float]


class MultiStep:
    """Makes groups of steps of an epoch."""

    def __init__(self, loop: Any, fetcher: Any) -> None:
        trainer = loop.trainer
        self.loop, self.fetcher, self.trainer, self.module = loop, fetcher, trainer, trainer.lightning_module
        self.stopped = False  # whether the last group ended because a stop was requested
        self._step_seconds = MAX_SECONDS / 2
        self._limits: list[tuple[Limit, Any]] = []  # with the callback or module if it can defer a row, else None
        self._rows: list[tuple[int, dict[str, Any]]] = []  # deferred, with their steps
        self._observers: list[Callable[..., None]] = []
        self._hooks: dict[str, list[Callable[..., Any]]] = {name: [] for name in EVERY_STEP}
        self.strategy, self.precision = trainer.strategy, trainer.precision_plugin
        self.counts: Any = loop.automatic_optimization.optim_progress.optimizer
        self.optimizer: Optimizer = trainer.optimizers[0]
        self.iterator: Any = fetcher.combined_loader._iterator
        self.direct = type(self.precision) is Precision and self.strategy.model is self.module
        data = trainer.datamodule
        owners = [self.module] if data is None else [self.module, data]
        self.transfers = type(self.precision).convert_input is not Precision.convert_input or any(
            _overrides(owner, name, LightningModule) for owner in owners for name in TRANSFER_HOOKS
        )
        self.update, self.zero_grad = short_step(self.optimizer), short_zero_grad(self.optimizer)
        self.schedules: list[tuple[Any, Callable[[], Any]]] = [
            (config, short_schedule(config.scheduler))
            for config in trainer.lr_scheduler_configs
            if config.interval == "step"
        ]
        self.own_schedule = _overrides(self.module, "lr_scheduler_step", LightningModule)

    @classmethod
    def create(cls, loop: Any, fetcher: _DataFetcher) -> "MultiStep | None":
        """Return None where Lightning has to make every step."""
        trainer: Any = loop.trainer
        if loop.steps_per_call == 1 or type(trainer.profiler) is not PassThroughProfiler:
            return None
        if any(config.interval == "step" and config.reduce_on_plateau for config in trainer.lr_scheduler_configs):
            return None
        if trainer.accumulate_grad_batches != 1 or (trainer.world_size > 1 and not ranks_agree_on_stops(trainer)):
            return None
        if not _has_one_sized_loader(fetcher) or not has_plain_step(trainer):
            return None
        if "whole_step" not in vars(trainer.lightning_module) and _needs_closure(trainer.optimizers[0]):
            return None
        steps = cls(loop, fetcher)
        return steps if steps._collect_hooks() else None

    def _collect_hooks(self) -> bool:
        """Collect what callbacks and module declare; return whether steps may be grouped."""
        module, trainer = self.module, self.trainer
        if not hasattr(module, "skippable_steps"):
            return False
        if not module.standard_step or any(name in vars(module) for name in STEP_METHODS):
            _report_single_steps(f"{type(module).__name__}.training_step", type(module))
            return False
        if (hook := module.own_hook()) is not None:
            _report_single_steps(hook, hook)
            return False
        for part, base in [*((callback, Callback) for callback in trainer.callbacks), (module, LightningModule)]:
            hooks = [name for name in HOOKS if _overrides(part, name, base) and callable(getattr(part, name))]
            if not hooks and part is not module:
                continue
            every_step = getattr(part, "every_step", ())
            limit: Limit | None = _until_logged if type(part) in LOGGED_STEPS_ONLY else None
            skipped = set(hooks).difference(every_step)
            if limit is None and set(every_step) <= set(EVERY_STEP) and _declares(part, "skippable_steps", skipped):
                limit = part.skippable_steps
            if limit is None:
                stated = getattr(part, "skippable_steps", part) is None
                if not stated and not type(part).__module__.startswith("lightning."):  # not for a user to change
                    _report_single_steps(f"{type(part).__name__}.{hooks[0]}", type(part))
                return False
            # Several processes would have to reduce their metrics at the same steps.
            defers = trainer.world_size == 1 and _declares(part, "can_defer_log", ["skippable_steps"])
            self._limits.append((limit, part if defers else None))
            for name in every_step:
                self._hooks[name].append(getattr(part, name))
            if (observer := getattr(part, "on_skipped_steps", None)) is not None:
                self._observers.append(observer)
        return True

    def run_groups(self, most: float) -> int:
        """Make up to `most` steps in groups; return how many. `stopped` is set if a stop was requested."""
        self.stopped = False
        done, began = 0, perf_counter()
        try:
            while not self.stopped:
                count, logging = self._next_group(most - done, MAX_SECONDS - (perf_counter() - began))
                if not count:
                    break
                steps = self._run_group(count, logging)
                done += steps
                if steps < count:
                    break
        finally:
            self._write_rows()
        return done

    def _next_group(self, most: float, seconds: float) -> tuple[int, list[Any]]:
        """Return how many of the next `most` steps can be grouped within `seconds`, and who logs the last of them."""
        fetcher, loop = self.fetcher, self.loop
        most = min(most, MAX_STEPS, fetcher.length - fetcher.fetched - 1)
        if most < 1 or seconds <= 0 or loop.batch_progress.current.ready == 0:
            return 0, []
        most = min(most, max(1, int(seconds / self._step_seconds)))
        if loop.max_steps >= 0:
            most = min(most, loop.max_steps - loop.global_step - 1)
        until_row, logging = math.inf, list[Any]()
        for limit, part in self._limits:
            skips = limit(self.trainer)
            if part is None or not part.can_defer_log(self.trainer):
                most = min(most, skips)
            elif skips < until_row:
                until_row, logging = skips, [part]
            elif skips == until_row:
                logging.append(part)
        if 0 <= until_row < most:
            return int(until_row) + 1, logging
        return max(0, int(most)), []

    def _run_group(self, count: int, logging: list[Any]) -> int:
        """Make `count` steps and return how many were made; `logging` defer a row of the last one."""
        trainer, module, optimizer = self.trainer, self.module, self.optimizer
        signals, compiled, window = trainer._signal_connector, vars(module).get("whole_step"), self.loop.window
        zero_grad, update, stepped = self.zero_grad, self.update, self.counts.step
        train: Any = module.training_step if self.direct else self.strategy.training_step
        start, before_backward, before_step, end = (self._hooks[name] for name in EVERY_STEP)
        first, done, waited = self.loop.batch_progress.current.ready, 0, 0.0
        batches: list[Any] = []
        began = perf_counter()
        try:
            while done < count:
                fetch_began = perf_counter()
                try:
                    batch = self._next_batch()
                except StopIteration:
                    break
                waited += perf_counter() - fetch_began
                batches.append(batch)
                index = first + done
                for hook in start:
                    hook(trainer, module, batch, index)
                if done + 1 == count:
                    self._defer_rows(trainer.global_step + 1, logging, "deferred_row_at_start")
                stepped.total.ready += 1
                stepped.current.ready += 1
                if compiled is not None:
                    loss = shown = compiled(batch)
                else:
                    loss = shown = train(batch, index)
                    if window is not None:
                        loss = window.weigh(loss, batch)
                    zero_grad()
                    for hook in before_backward:
                        hook(trainer, module, loss)
                    loss.backward()
                    for hook in before_step:
                        hook(trainer, module, optimizer)
                    if trainer.gradient_clip_val:
                        self.precision._clip_gradients(
                            module,
                            optimizer,
                            trainer.gradient_clip_val,
                            gradient_clip_algorithm=trainer.gradient_clip_algorithm,
                        )
                    update()
                stepped.total.completed += 1
                stepped.current.completed += 1
                done += 1
                self._step_schedules(index)
                if end:
                    outputs = {"loss": shown.detach()}
                    for hook in end:
                        hook(trainer, module, outputs, batch, index)
                if trainer.should_stop or signals.received_sigterm:
                    self.stopped = True
                    break
        finally:
            self._count(done, len(batches))
        # At most doubled: the machine may have been busy for a moment.
        self._step_seconds = min((perf_counter() - began) / max(done, 1), 2 * self._step_seconds)
        for observer in self._observers:
            observer(trainer, module, batches, waited)
        if done == count:
            self._defer_rows(trainer.global_step, logging, "deferred_row")
        return done

    def _next_batch(self) -> Any:
        """Return the next batch on the device, in the precision's number format."""
        fetcher = self.fetcher
        try:
            batch = next(self.iterator.iterators[0])
        except StopIteration:
            fetcher.done = True
            raise
        self.iterator._idx += 1
        fetcher.fetched += 1
        fetcher.done = fetcher.fetched >= fetcher.length
        parts = batch if type(batch) in (tuple, list) else (batch,)
        device = self.strategy.root_device
        if self.transfers or not all(type(part) is Tensor and part.device == device for part in parts):
            batch = self.precision.convert_input(batch)
            batch = self.module._on_before_batch_transfer(batch, dataloader_idx=0)
            batch = call._call_strategy_hook(self.trainer, "batch_to_device", batch, dataloader_idx=0)
        return batch

    def _step_schedules(self, index: int) -> None:
        progress = self.loop.scheduler_progress
        for config, step in self.schedules:
            if (index + 1) % config.frequency:
                continue
            progress.increment_ready()
            if self.own_schedule:
                call._call_lightning_module_hook(self.trainer, "lr_scheduler_step", config.scheduler, None)
            else:
                step()
            progress.increment_completed()

    def _count(self, done: int, fetched: int) -> None:
        """Advance Lightning's counters by a group, whose last step an exception may have interrupted."""
        progress = self.loop.batch_progress
        for batches in (progress.total, progress.current):
            batches.ready += fetched
            batches.started += fetched
            batches.processed += done
            batches.completed += done
        for zeroed in (self.counts.zero_grad.total, self.counts.zero_grad.current):
            zeroed.ready += done
            zeroed.started += done
            zeroed.completed += done

    def _defer_rows(self, step: int, parts: list[Any], function: str) -> None:
        rows = [getattr(part, function)(self.trainer) for part in parts if hasattr(part, function)]
        self._rows += [(step, row) for row in rows if row is not None]

    def _write_rows(self) -> None:
        """Write one row per step to the loggers."""
        if not self._rows:
            return
        rows, self._rows = self._rows, []
        for _, part in self._limits:
            if hasattr(part, "complete_deferred_rows"):
                part.complete_deferred_rows(self.trainer)
        by_step = dict[int, dict[str, Any]]()
        for step, row in rows:
            by_step.setdefault(step, {}).update(row)
        for logger in self.trainer.loggers:
            for step, row in by_step.items():
                if row:
                    logger.log_metrics(dict(row), step=step)


def ranks_agree_on_stops(trainer: Any) -> bool:
    """Return whether a callback has all processes stop together; else Lightning asks them at every batch."""
    return any(getattr(callback, "stops_all", False) for callback in trainer.callbacks)


def _until_logged(trainer: Any) -> float:
    return steps_before(trainer, trainer.log_every_n_steps)


def _declares(part: Any, name: str, others: Iterable[str]) -> bool:
    """Return whether `name` is defined by the class that defines `others`, or by a subclass of it.

    A user's subclass that overrides one of `others` may need more than its parent declared.
    """

    def depth(attribute: str) -> float:
        homes = [vars(part), *(vars(kind) for kind in type(part).__mro__)]
        return next((number for number, home in enumerate(homes) if attribute in home), math.inf)

    return depth(name) < math.inf and all(depth(name) <= depth(other) for other in others)


def _overrides(owner: Any, name: str, base: type) -> bool:
    return name in vars(owner) or getattr(type(owner), name) is not getattr(base, name)


def _has_one_sized_loader(fetcher: _DataFetcher) -> bool:
    """Return whether there is one loader of known length, whose batches need no combining."""
    if type(fetcher) is not _PrefetchDataFetcher or fetcher.length is None:
        return False
    combined = fetcher.combined_loader
    iterator = combined._iterator
    alone = len(combined.flattened) == 1 and combined.iterables is combined.flattened[0]
    return alone and iterator is not None and not isinstance(iterator, _Sequential) and len(iterator.iterators) == 1


def has_plain_step(trainer: Any) -> bool:
    """Return whether a step is forward and backward of the module and the optimizer's update, with or without DDP."""
    module, strategy, precision = trainer.lightning_module, trainer.strategy, trainer.precision_plugin
    if not module.automatic_optimization or any(_overrides(module, name, LightningModule) for name in MODULE_STEP):
        return False
    if isinstance(precision, MixedPrecision) and precision.scaler is not None:
        return False
    if isinstance(strategy, DDPStrategy) and strategy._model_averager is not None:
        return False
    known = (Strategy, DDPStrategy) if isinstance(strategy, DDPStrategy) else (Strategy,)
    return all(
        getattr(type(part), name) in [getattr(base, name) for base in bases]
        for part, names, bases in (
            (strategy, STRATEGY_STEP, known),
            (precision, PRECISION_STEP, (Precision, MixedPrecision)),
        )
        for name in names
    )


def _needs_closure(optimizer: Optimizer) -> bool:
    """Return whether the optimizer may have to compute the loss itself, or a hook watches its step begin.

    An optimizer with its own `step` declares that it does not by the class attribute `needs_closure = False`.
    """
    kind = type(optimizer)
    in_torch = kind.step.__module__.startswith("torch.optim.") and not issubclass(kind, LBFGS)
    if getattr(kind, "needs_closure", not in_torch):
        return True
    return bool(optimizer._optimizer_step_pre_hooks or _global_optimizer_pre_hooks)


_reported: set[Any] = set()


@rank_zero_only
def _report_single_steps(name: str, key: Any) -> None:
    """Print once for each `key` what makes a run go step by step."""
    if key not in _reported:
        _reported.add(key)
        print(f"trainer.steps_per_call=auto: {name} may need every step, so steps are not grouped (docs/speed.md).")
