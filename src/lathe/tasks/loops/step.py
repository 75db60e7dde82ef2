"""An optimizer step as Lightning makes it, without what it does around it."""

from collections import OrderedDict
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.loops.fetchers import _PrefetchDataFetcher
from lightning.pytorch.loops.utilities import _block_parallel_sync_behavior
from lightning.pytorch.plugins import MixedPrecision, Precision
from lightning.pytorch.strategies import DDPStrategy, Strategy
from lightning.pytorch.trainer import call
from lightning.pytorch.utilities.combined_loader import _ModeIterator, _Sequential
from torch import Tensor
from torch.optim import LBFGS, Optimizer
from torch.optim.optimizer import _global_optimizer_pre_hooks

from lathe.errors import UserError, require
from lathe.optim.short import short_schedule, short_step, short_zero_grad
from lathe.tasks.loops.batches import Batches, overrides

HOOKS = (
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
)
# what a step is made of, where the module or the strategy does it as Lightning does
MODULES = ("backward", "optimizer_step", "optimizer_zero_grad", "configure_gradient_clipping")
STRATEGYS = ("training_step", "backward", "pre_backward", "post_backward", "optimizer_step", "on_train_batch_start")


class Step(Batches):
    """The steps of an epoch, made one by one, and what of Lightning's each has to go through."""

    def __init__(self, loop: Any, fetcher: _PrefetchDataFetcher) -> None:
        trainer = loop.trainer
        super().__init__(trainer, loop._results, HOOKS, "training_step")
        self.loop, self.fetcher = loop, fetcher
        self.progress: Any = loop.batch_progress
        self.optimization: Any = loop.automatic_optimization
        self.optimizer: Optimizer = trainer.optimizers[0]
        self.every: int = trainer.accumulate_grad_batches
        self.window = loop.window
        self.iterator = _only_iterator(fetcher)
        self.fetched = vars(loop).get("_on_before_fetch")
        self.broadcasts = trainer.world_size > 1 and not _agrees(trainer.callbacks)
        module, strategy, precision = self.module, self.strategy, self.precision
        own = any(overrides(module, name, LightningModule) for name in MODULES)
        self.plain = _plain(strategy) and _plain_precision(precision) and not own
        self.direct = type(precision) is Precision and strategy.model is module
        self.whole: Any = vars(module).get("whole_step")
        if self.whole is not None:
            self.whole.bind(trainer)
            require(
                self.plain and self.every == 1,
                "compile.scope=step: the strategy, the number format or the task has a step of its own, which a "
                "compiled one does not go through: use compile.scope=net.",
            )
            hooks = [getattr(callback, "on_whole_step", None) for callback in trainer.callbacks]
            self.after_whole = [hook for hook in hooks if hook is not None]
        self.needs_closure = _needs_closure(self.optimizer)
        self.update, self.zero_grad = short_step(self.optimizer), short_zero_grad(self.optimizer)
        self.schedules: list[tuple[Any, Callable[[], Any]]] = [
            (one, short_schedule(one.scheduler))
            for one in trainer.lr_scheduler_configs
            if one.interval == "step" and not one.reduce_on_plateau
        ]
        self.own_schedule = overrides(module, "lr_scheduler_step", LightningModule)

    def step(self) -> None:
        """Lightning's `advance`."""
        loop, progress = self.loop, self.progress
        if self.broadcasts:
            loop._broadcast_sigterm_tensor()
        batch = self._fetch()
        total, current = progress.total, progress.current
        index = current.ready  # before it is counted
        progress.is_last_batch = self.fetcher.done
        batch = self.moved(batch)
        total.ready += 1
        current.ready += 1
        self.begin(batch)
        outputs: Any = None
        if batch is None:
            loop._warning_cache.warn("train_dataloader yielded None. If this was on purpose, ignore this warning...")
        else:
            if self._open(batch, index) == -1:
                progress.increment_by(0, is_last_batch=True)
                progress.increment_processed()
                self._schedule(index)
                raise StopIteration
            total.started += 1
            current.started += 1
            outputs = self._plain_step(batch, index) if self.plain else self._lightnings_step(batch, index)
        total.processed += 1
        current.processed += 1
        self._schedule(index)
        self.call("on_train_batch_end", outputs, batch, index)
        logged = self.end()
        total.completed += 1
        current.completed += 1
        if logged:
            self.connector.update_train_step_metrics()

    def _fetch(self) -> Any:
        fetcher, iterator = self.fetcher, self.iterator
        if iterator is None or fetcher.length is None or fetcher.batches:
            return next(fetcher)[0]
        if self.fetched is not None:
            self.fetched()
        return self._next()

    def _next(self) -> Any:
        """The only loader's batch, of a known number."""
        fetcher: Any = self.fetcher
        iterator: Any = self.iterator
        try:
            batch = next(iterator.iterators[0])
        except StopIteration:
            fetcher.done = True
            raise
        iterator._idx += 1
        fetcher.fetched += 1
        fetcher.done = fetcher.fetched >= fetcher.length
        return batch

    def _open(self, batch: Any, index: int) -> Any:
        answer = self.call("on_train_batch_start", batch, index)
        if not self.plain:
            call._call_strategy_hook(self.trainer, "on_train_batch_start", batch, index)
        return answer

    def _step_schedules(self, index: int) -> None:
        loop = self.loop
        for one, step in self.schedules:
            if (index + 1) % one.frequency:
                continue
            loop.scheduler_progress.increment_ready()
            if self.own_schedule:
                call._call_lightning_module_hook(self.trainer, "lr_scheduler_step", one.scheduler, None)
            else:
                step()
            loop.scheduler_progress.increment_completed()

    def _schedule(self, index: int) -> None:
        loop = self.loop
        if self.schedules and not (self.every > 1 and loop._should_accumulate()):
            self._step_schedules(index)
        if loop._num_ready_batches_reached():
            loop.update_lr_schedulers("epoch", update_plateau_schedulers=False)

    def _lightnings_step(self, batch: Any, index: int) -> Any:
        kwargs = self.loop._build_kwargs(OrderedDict(), batch, index)
        return self.optimization.run(self.optimizer, index, kwargs)

    def _plain_step(self, batch: Any, index: int) -> dict[str, Any]:
        """`_AutomaticOptimization.run`."""
        if self.every > 1 and self.loop._should_accumulate():
            with _block_parallel_sync_behavior(self.strategy, block=True), torch.enable_grad():
                return self._backward(batch, index)[1]
        progress = self.optimization.optim_progress.optimizer.step
        progress.total.ready += 1
        progress.current.ready += 1
        if self.whole is not None and self.trainer.global_step:
            loss = self.whole(batch)
            self.optimization.optim_progress.optimizer.zero_grad.increment_by(1)
            outputs: dict[str, Any] = {"loss": loss}
            for hook in self.after_whole:
                hook(self.trainer, self.module, loss)
        elif self.needs_closure:
            kept: list[Any] = []

            def closure() -> Any:
                with torch.enable_grad():
                    kept[:] = self._backward(batch, index)
                self._before_step()
                return kept[0]

            self.optimizer.step(closure)
            outputs = kept[1]
        else:
            with nullcontext() if self.whole is None else torch.compiler.set_stance("force_eager"):
                outputs = self._backward(batch, index)[1]
            self._before_step()
            self.update()
        progress.total.completed += 1
        progress.current.completed += 1
        return outputs

    def _before_step(self) -> None:
        self.call("on_before_optimizer_step", self.optimizer)
        if self.trainer.gradient_clip_val:
            self._clip()

    def _clip(self) -> None:
        value, how = self.trainer.gradient_clip_val, self.trainer.gradient_clip_algorithm
        self.precision._clip_gradients(self.module, self.optimizer, value, gradient_clip_algorithm=how)

    def _backward(self, batch: Any, index: int) -> tuple[Tensor | None, dict[str, Any]]:
        """Loss and gradients: the loss, and what hooks are shown of the step."""
        module = self.module
        module.__dict__["_current_fx_name"] = "training_step"
        args = (batch, index) if self.takes_index else (batch,)
        output = module.training_step(*args) if self.direct else self.strategy.training_step(*args)
        module.__dict__["_current_fx_name"] = None
        shown: dict[str, Any]
        if type(output) is Tensor:
            loss: Tensor | None = output if self.every == 1 else output / self.every
            shown = {"loss": loss.detach()}  # type: ignore[union-attr]
        else:
            loss, shown = self._other_output(output)
        if self.window is not None:
            loss = self.window.weigh(loss, batch)
        if index % self.every == 0:
            zeroed = self.optimization.optim_progress.optimizer.zero_grad
            zeroed.increment_ready()
            self.call("on_before_zero_grad", self.optimizer)
            zeroed.increment_started()
            self.zero_grad()
            zeroed.increment_completed()
        if loss is not None:
            self.call("on_before_backward", loss)
            loss.backward()
            self.call("on_after_backward")
        return loss, shown

    def _other_output(self, output: Any) -> tuple[Tensor | None, dict[str, Any]]:
        """What Lightning makes of a dict, of None, and of what it refuses."""
        if output is None and self.trainer.world_size > 1:
            raise UserError(
                f"training_step of {type(self.module).__name__} returned None, which skips a step of one process while "
                "the others wait in it: return a loss that is multiplied by 0, or take trainer.devices=1."
            )
        kind = self.optimization.output_result_cls
        made: Any = kind.from_training_step_output(output, self.every)
        loss: Tensor | None = made.closure_loss
        if loss is None:
            self.loop._warning_cache.warn(
                "`training_step` returned `None`. If this was on purpose, ignore this warning..."
            )
        return loss, {} if made.loss is None else made.asdict()


def _only_iterator(fetcher: _PrefetchDataFetcher) -> _ModeIterator | None:
    """What is asked for batches, where they come from one loader as they are."""
    combined = fetcher.combined_loader
    iterator = combined._iterator
    alone = len(combined.flattened) == 1 and combined.iterables is combined.flattened[0]
    if not alone or iterator is None or isinstance(iterator, _Sequential) or len(iterator.iterators) != 1:
        return None
    return iterator


def _agrees(callbacks: list[Callback]) -> bool:
    """Whether one of them sees to it that all processes stop at the same step."""
    return any(getattr(callback, "stops_all", False) for callback in callbacks)


def _plain(strategy: Strategy) -> bool:
    """Whether a step is the module's own, forward and backward, behind DDP or behind nothing."""
    kind = type(strategy)
    if isinstance(strategy, DDPStrategy):
        if strategy._model_averager is not None:
            return False
        return all(getattr(kind, name) in (getattr(DDPStrategy, name), getattr(Strategy, name)) for name in STRATEGYS)
    return all(getattr(kind, name) is getattr(Strategy, name) for name in STRATEGYS)


def _plain_precision(precision: Precision) -> bool:
    if isinstance(precision, MixedPrecision) and precision.scaler is not None:
        return False
    kind = type(precision)
    names = ("pre_backward", "backward", "post_backward", "optimizer_step", "_after_closure", "_wrap_closure")
    return all(getattr(kind, name) in (getattr(Precision, name), getattr(MixedPrecision, name)) for name in names)


def _needs_closure(optimizer: Optimizer) -> bool:
    """Whether it may run the step itself, or somebody watches it doing so."""
    known = type(optimizer).__module__.startswith(("torch.optim.", "lathe.optim.")) and type(optimizer) is not LBFGS
    return not known or bool(optimizer._optimizer_step_pre_hooks or _global_optimizer_pre_hooks)
