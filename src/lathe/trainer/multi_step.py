"""Several optimizer steps per loop call, where no hook needs to see the steps between.

Callbacks and tasks opt in with `skippable_steps` (`lathe.callbacks.SkippableHooks` documents it). A group of steps runs
forward, backward, update and the hooks in `every_step`. It ends before a step that a skipped hook needs, before a
validation or the end of an epoch, and after 0.1 s, so that the progress bar stays live. A logged step does not end a
group if all that log it can defer their rows: these are collected and written when the group ends.
"""

import math
from collections.abc import Callable, Iterable
from time import perf_counter
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import DeviceStatsMonitor, LearningRateMonitor
from lightning.pytorch.loops.fetchers import _DataFetcher, _PrefetchDataFetcher
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from lathe.data.steps import steps_before
from lathe.tasks.module_protocol import foreign_hook
from lathe.trainer.optimizer_step import HOOKS, OptimizerStep, is_on, overrides, overriding

# hooks that `every_step` may name
EVERY_STEP = ("on_train_batch_start", "on_before_backward", "on_before_optimizer_step", "on_train_batch_end")
MAX_STEPS = 64  # of a group, which keeps its batches
MAX_SECONDS = 0.1  # of a group
LOGGED_STEPS_ONLY = (LearningRateMonitor, DeviceStatsMonitor)  # Lightning's own callbacks that act at logged steps
# what a task's `standard_step` speaks for
STEP_METHODS = ("training_step", "losses", "reduce", "scored")

Limit = Callable[[Any], float]


class MultiStep(OptimizerStep):
    """Makes the steps of an epoch, in groups where that is possible."""

    def __init__(self, loop: Any, fetcher: _PrefetchDataFetcher) -> None:
        super().__init__(loop, fetcher)
        self.stopped = False  # whether the last group ended because a stop was requested
        self._step_seconds = MAX_SECONDS / 2
        self._limits: list[Limit] = []
        self._observers: list[Callable[..., None]] = []
        self._deferred = DeferredLog(self.trainer)
        self._hooks: dict[str, list[Callable[..., Any]]] = {name: [] for name in EVERY_STEP}
        self.groups = self._find_hooks()

    @classmethod
    def create(cls, loop: Any, fetcher: _DataFetcher) -> "MultiStep | None":
        """Return None where Lightning's own loop has to make the steps."""
        trainer: Any = loop.trainer
        waits = any(one.interval == "step" and one.reduce_on_plateau for one in trainer.lr_scheduler_configs)
        if (
            loop.steps_per_call == 1
            or waits
            or not trainer.lightning_module.automatic_optimization
            or type(fetcher) is not _PrefetchDataFetcher
            or type(trainer.profiler) is not PassThroughProfiler
        ):
            return None
        return cls(loop, fetcher)

    def _find_hooks(self) -> bool:
        """Collect what callbacks and module declare; return whether steps may be grouped."""
        module = self.module
        if not hasattr(module, "skippable_steps") or not self.plain or self.accumulate != 1 or self.broadcasts:
            return False
        if self.iterator is None or self.fetcher.length is None:
            return False
        if not module.standard_step or any(name in vars(module) for name in STEP_METHODS):
            _report_single_steps(f"{type(module).__name__}.training_step", type(module))
            return False
        if (hook := foreign_hook(module)) is not None:
            _report_single_steps(hook, hook)
            return False
        own = [name for name in HOOKS if overrides(module, name, LightningModule)]
        parts = [(one, names) for one in self.trainer.callbacks if (names := _overridden(one))]
        for part, names in [*parts, (module, own)]:
            limit = declared_limit(part, names)
            if limit is None:
                stated = getattr(part, "skippable_steps", part) is None
                if not stated and not type(part).__module__.startswith("lightning."):  # not for a user to change
                    _report_single_steps(f"{type(part).__name__}.{names[0]}", type(part))
                return False
            if not self._deferred.add(part, limit):
                self._limits.append(limit)
            for name in getattr(part, "every_step", ()):
                self._hooks[name].append(getattr(part, name))
            if (observer := getattr(part, "on_skipped_steps", None)) is not None:
                self._observers.append(observer)
        return True

    def single_step(self) -> None:
        began = perf_counter()
        super().single_step()
        # The estimate may come from a moment when the machine was busy.
        self._step_seconds = min(self._step_seconds, perf_counter() - began)

    def run_groups(self, most: float) -> int:
        """Make up to `most` steps in groups; return how many. `stopped` is set if a stop was requested."""
        self.stopped = False
        done, began = 0, perf_counter()
        count, rows_due = self._next_group(most, MAX_SECONDS)
        try:
            while count and not self.stopped:
                made = self._run_group(count, rows_due)
                done += made
                if made < count or not rows_due:
                    break
                count, rows_due = self._next_group(most - done, MAX_SECONDS - (perf_counter() - began))
        finally:
            self._deferred.write()
        return done

    def _next_group(self, most: float, seconds: float) -> tuple[int, list[Any]]:
        """Return how many of the next `most` steps can be grouped within `seconds`, and who logs the last of them."""
        if not self.groups or most < 1 or seconds <= 0 or self.progress.current.ready == 0:
            return 0, []
        fetcher: Any = self.fetcher
        loop = self.loop
        most = min(most, MAX_STEPS, fetcher.length - fetcher.fetched - 1)
        if self._step_seconds * most > seconds:
            most = int(seconds / self._step_seconds)
        if loop.max_steps >= 0:
            most = min(most, loop.max_steps - loop.global_step - 1)
        for limit in self._limits:
            if most < 1:
                return 0, []
            most = min(most, limit(self.trainer))
        most, rows_due = self._deferred.limit(most)
        return max(0, int(most)), rows_due

    def _run_group(self, count: int, rows_due: list[Any]) -> int:
        """Make `count` steps and return how many were made; `rows_due` log the last one."""
        trainer, module, optimizer, device = self.trainer, self.module, self.optimizer, self.device
        signals, compiled, window = trainer._signal_connector, self.compiled, self.window
        zero_grad, update, stepped = self.zero_grad, self.update, self.counts.step
        train: Any = module.training_step if self.direct else self.strategy.training_step
        start, before_backward, before_step, end = (self._hooks[name] for name in EVERY_STEP)
        first, done, waited = self.progress.current.ready, 0, 0.0
        batches: list[Any] = []
        began = perf_counter()
        try:
            while done < count:
                asked = perf_counter()
                try:
                    batch = self.next_batch()
                except StopIteration:
                    break
                if self.converts or self.transfers or not is_on(batch, device):
                    batch = self.to_device(batch)
                waited += perf_counter() - asked
                batches.append(batch)
                index = first + done
                for hook in start:
                    hook(trainer, module, batch, index)
                if done + 1 == count and rows_due:
                    self._deferred.start_rows(rows_due)
                stepped.total.ready += 1
                stepped.current.ready += 1
                if compiled is not None:
                    loss = shown = compiled(batch)
                    for hook in self.after_compiled:
                        hook(trainer, module, loss)
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
                    self.clip()
                    update()
                stepped.total.completed += 1
                stepped.current.completed += 1
                done += 1
                if self.schedules:
                    self.step_schedules(index)
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
        if rows_due and done == count:
            self._deferred.end_rows(rows_due)
        return done

    def _count(self, done: int, fetched: int) -> None:
        """Advance Lightning's counters by a group, whose last step an exception may have interrupted."""
        for batches in (self.progress.total, self.progress.current):
            batches.ready += fetched
            batches.started += fetched
            batches.processed += done
            batches.completed += done
        for zeroed in (self.counts.zero_grad.total, self.counts.zero_grad.current):
            zeroed.ready += done
            zeroed.started += done
            zeroed.completed += done


class DeferredLog:
    """Rows of logged steps inside a group, written to the loggers when the group ends.

    For one process: several would have to reduce their metrics at the same steps.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer: Any = trainer
        self.parts: list[tuple[Any, Limit]] = []
        self.rows: list[tuple[int, dict[str, Any]]] = []

    def add(self, part: Any, limit: Limit) -> bool:
        """Add a part that can defer its rows; return whether it can."""
        can = self.trainer.world_size == 1 and can_defer(part)
        if can:
            self.parts.append((part, limit))
        return can

    def limit(self, most: float) -> tuple[float, list[Any]]:
        """Return how many of the next `most` steps the parts can skip, and those that log the last of them."""
        until_row, rows_due = math.inf, list[Any]()
        for part, limit in self.parts:
            skips = limit(self.trainer)
            if not part.can_defer_log(self.trainer):
                most = min(most, skips)
            elif skips < until_row:
                until_row, rows_due = skips, [part]
            elif skips == until_row:
                rows_due.append(part)
        return (until_row + 1, rows_due) if 0 <= until_row < most else (most, [])

    def start_rows(self, parts: list[Any]) -> None:
        """Collect what the parts log before a step's forward pass."""
        self._collect(parts, "deferred_row_at_start", self.trainer.global_step + 1)

    def end_rows(self, parts: list[Any]) -> None:
        """Collect what the parts log after a step's update."""
        self._collect(parts, "deferred_row", self.trainer.global_step)

    def _collect(self, parts: list[Any], name: str, step: int) -> None:
        for part in parts:
            row = getattr(part, name, None)
            if row is not None and (values := row(self.trainer)) is not None:
                self.rows.append((step, values))

    def write(self) -> None:
        """Write one row per step."""
        if not self.rows:
            return
        rows, self.rows = self.rows, []
        for part, _ in self.parts:
            if (complete := getattr(part, "complete_deferred_rows", None)) is not None:
                complete(self.trainer)
        by_step = dict[int, dict[str, Any]]()
        for step, row in rows:
            by_step.setdefault(step, {}).update(row)
        for logger in self.trainer.loggers:
            for step, row in by_step.items():
                if row:
                    logger.log_metrics(dict(row), step=step)


def declared_limit(part: Any, hooks: Iterable[str]) -> Limit | None:
    """Return `part.skippable_steps` if it speaks for these overridden hooks; None if every step needs them."""
    if type(part) in LOGGED_STEPS_ONLY:
        return lambda trainer: steps_before(trainer, trainer.log_every_n_steps)
    every_step = getattr(part, "every_step", ())
    if set(every_step) <= set(EVERY_STEP) and _declares(part, "skippable_steps", set(hooks).difference(every_step)):
        limit: Limit = part.skippable_steps
        return limit
    return None


def can_defer(part: Any) -> bool:
    """Return whether the part's class declares `can_defer_log` for its `skippable_steps`."""
    return _declares(part, "can_defer_log", ["skippable_steps"])


def _declares(part: Any, name: str, others: Iterable[str]) -> bool:
    """Return whether `name` is defined by the class that defines `others`, or by a subclass of it.

    A user's subclass that overrides one of `others` may need more than its parent declared.
    """

    def depth(attribute: str) -> float:
        homes = [vars(part), *(vars(kind) for kind in type(part).__mro__)]
        return next((number for number, home in enumerate(homes) if attribute in home), math.inf)

    return depth(name) < math.inf and all(depth(name) <= depth(other) for other in others)


def _overridden(callback: Any) -> list[str]:
    return [name for name in HOOKS if overriding([callback], name)]


_reported: set[Any] = set()


@rank_zero_only
def _report_single_steps(name: str, key: Any) -> None:
    """Print once for each `key` what makes a run go step by step."""
    if key not in _reported:
        _reported.add(key)
        print(f"trainer.steps_per_call=auto: {name} may need every step, so steps are not grouped (docs/running.md).")
