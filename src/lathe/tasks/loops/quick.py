"""Steps that nobody looks at, several at once."""

from collections.abc import Callable
from time import perf_counter
from typing import Any

from lightning.pytorch.loops.fetchers import _DataFetcher, _PrefetchDataFetcher
from lightning.pytorch.profilers import PassThroughProfiler

from lathe.tasks.hooks import foreign_hook
from lathe.tasks.loops.batches import is_on, overriding
from lathe.tasks.loops.notes import Notes
from lathe.tasks.loops.quiet import says, tell, tell_looker, unknown_part
from lathe.tasks.loops.step import HOOKS, Step

# those of a step that nobody looks at, for whom it has to be
QUICK = ("on_train_batch_start", "on_before_backward", "on_before_optimizer_step", "on_train_batch_end")
MOST_QUICK = 64  # of them at once, whose batches are kept
QUICK_SECONDS = 0.1  # that they take together: half of what lies between two draws of the bar


class Steps(Step):
    """The steps of an epoch: several at once between two that somebody looks at."""

    def __init__(self, loop: Any, fetcher: _PrefetchDataFetcher) -> None:
        super().__init__(loop, fetcher)
        self.stopped, self._seconds = False, QUICK_SECONDS / 2
        self.quiet: list[Callable[[Any], float]] = []
        self.told: list[Callable[..., None]] = []
        self.notes = Notes(self.trainer)
        self.quick_hooks = self._quick_hooks()

    @classmethod
    def found(cls, loop: Any, fetcher: _DataFetcher) -> "Steps | None":
        """None where steps are made in Lightning's way alone."""
        trainer: Any = loop.trainer
        waits = any(one.interval == "step" and one.reduce_on_plateau for one in trainer.lr_scheduler_configs)
        if (
            waits
            or not trainer.lightning_module.automatic_optimization
            or type(fetcher) is not _PrefetchDataFetcher
            or type(trainer.profiler) is not PassThroughProfiler
        ):
            return None
        return cls(loop, fetcher)

    def _quick_hooks(self) -> tuple[list[Callable[..., Any]], ...]:
        """Hooks that no step goes without, of a step's start, loss, gradients and end; empty where every step has to be
        made by itself: whoever overrides one of a batch's hooks has to say how many steps it can do without
        (`quiet_steps`).
        """
        known = getattr(self.module, "quiet_steps", None)
        if known is None or self.loop.steps_per_call == 1 or not self.plain or self.every != 1 or self.broadcasts:
            return ()
        if self.needs_closure or self.iterator is None or self.fetcher.length is None:
            return ()
        unknown = unknown_part(self.module)
        if unknown is not None:
            tell(self.module, unknown)
            return ()
        hook = foreign_hook(self.module)
        if hook is not None:
            tell_looker(hook, hook)
            return ()
        found: dict[str, list[Callable[..., Any]]] = {name: [] for name in QUICK}
        for callback in self.trainer.callbacks:
            overridden = [name for name in HOOKS if overriding([callback], name)]
            if not overridden:
                continue
            quiet = says(callback, overridden)
            each = getattr(callback, "each_step", ())
            if quiet is None or not set(each) <= set(QUICK):
                tell(callback, overridden[0])
                return ()
            if not self.notes.add(callback, quiet):
                self.quiet.append(quiet)
            for name in each:
                found[name].append(getattr(callback, name))
            if (told := getattr(callback, "on_quiet_steps", None)) is not None:
                self.told.append(told)
        if not self.notes.add(self.module, known):
            self.quiet.append(known)
        return tuple(found[name] for name in QUICK)

    def _quiet_steps(self, most: float, seconds: float) -> tuple[int, list[Any]]:
        """How many of the next `most` steps nobody looks at, short ones, of which each costs more than it takes, and no
        more than last `seconds`; and who takes note of the last of them.
        """
        if not self.quick_hooks or most < 1 or seconds <= 0 or self.progress.current.ready == 0:
            return 0, []
        fetcher: Any = self.fetcher
        loop = self.loop
        most = min(most, MOST_QUICK, fetcher.length - fetcher.fetched - 1)
        if self._seconds * most > seconds:
            most = int(seconds / self._seconds)
        if loop.max_steps >= 0:
            most = min(most, loop.max_steps - loop.global_step - 1)
        for ask in self.quiet:
            if most < 1:
                return 0, []
            most = min(most, ask(self.trainer))
        most, noting = self.notes.next(most)
        return max(0, int(most)), noting

    def step(self) -> None:
        began = perf_counter()
        super().step()
        # steps that were taken for long ones may be short after all
        self._seconds = min(self._seconds, perf_counter() - began)

    def quick(self, most: float) -> int:
        """Makes up to `most` steps of which nobody but each step's own hooks takes notice, but for what is written down
        of some; how many. `stopped` is whether one of those wants Lightning to look.
        """
        self.stopped = False
        done, began, left = 0, perf_counter(), QUICK_SECONDS
        count, noting = self._quiet_steps(most, left)
        try:
            while count and not self.stopped:
                made = self._several(count, noting)
                done += made
                if made < count or not noting:
                    break
                left = QUICK_SECONDS - (perf_counter() - began)
                count, noting = self._quiet_steps(most - done, left)
        finally:
            self.notes.write()
        return done

    def _several(self, count: int, noting: list[Any]) -> int:
        """`count` steps, of the last of which these take note."""
        module, optimizer, whole, device = self.module, self.optimizer, self.whole, self.device
        done, first, waited = 0, self.progress.current.ready, 0.0
        stepped, zeroed = self.optimization.optim_progress.optimizer.step, 0
        batches: list[Any] = []
        trainer, signals = self.trainer, self.trainer._signal_connector
        zero_grad, update = self.zero_grad, self.update
        train: Any = module.training_step if self.direct else self.strategy.training_step
        start, before, after, final = self.quick_hooks
        began = perf_counter()
        try:
            while done < count:
                asked = perf_counter()
                try:
                    batch = self._next()
                except StopIteration:
                    break
                if self.converts or self.moves or not is_on(batch, device):
                    batch = self.moved(batch)
                waited += perf_counter() - asked
                batches.append(batch)
                index = first + done
                for hook in start:
                    hook(trainer, module, batch, index)
                if done + 1 == count and noting:
                    self.notes.start(noting)
                stepped.total.ready += 1
                stepped.current.ready += 1
                if whole is not None:
                    loss = shown = whole(batch)
                    for hook in self.after_whole:
                        hook(trainer, module, loss)
                else:
                    loss = shown = train(batch, index)
                    if self.window is not None:
                        loss = self.window.weigh(loss, batch)
                    zero_grad()
                    for hook in before:
                        hook(trainer, module, loss)
                    loss.backward()
                    for hook in after:
                        hook(trainer, module, optimizer)
                    if trainer.gradient_clip_val:
                        self._clip()
                    update()
                stepped.total.completed += 1
                stepped.current.completed += 1
                zeroed += 1
                done += 1
                if self.schedules:
                    self._step_schedules(index)
                if final:
                    outputs = {"loss": shown.detach()}
                    for hook in final:
                        hook(trainer, module, outputs, batch, index)
                if trainer.should_stop or signals.received_sigterm:
                    self.stopped = True
                    break
        finally:
            self._count(done, len(batches), zeroed)
        # doubled at most: once the machine may just have been busy with something else
        self._seconds = min((perf_counter() - began) / max(done, 1), 2 * self._seconds)
        for told in self.told:
            told(trainer, module, batches, waited)
        if noting and done == count:
            self.notes.end(noting)
        return done

    def _count(self, done: int, fetched: int, zeroed: int) -> None:
        """Lightning's counters of `done` steps, the last of which may have been cut short by an error."""
        for tracker in (self.progress.total, self.progress.current):
            tracker.ready += fetched
            tracker.started += fetched
            tracker.processed += done
            tracker.completed += done
        zero_grad = self.optimization.optim_progress.optimizer.zero_grad
        for tracker in (zero_grad.total, zero_grad.current):
            tracker.ready += zeroed
            tracker.started += zeroed
            tracker.completed += zeroed
