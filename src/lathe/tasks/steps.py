"""Optimizer steps without what Lightning does around each.

Lightning 2.6 spends about a quarter of a millisecond on a step beside the step: contexts of a profiler that measures
nothing, batches that are moved to where they are, hooks that nobody overrides, metrics that nobody has logged. Here
everything that somebody does override is called in Lightning's order, with Lightning's counters at the same values, and
nothing else is done between two places at which Lightning has something of its own to do: a validation, the end of an
epoch, a stop.
"""

from collections import OrderedDict
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loops.evaluation_loop import _EvaluationLoop
from lightning.pytorch.loops.fetchers import _DataFetcher, _PrefetchDataFetcher
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.loops.utilities import _block_parallel_sync_behavior
from lightning.pytorch.plugins import MixedPrecision, Precision
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.strategies import DDPStrategy, Strategy
from lightning.pytorch.trainer import call
from lightning.pytorch.utilities.combined_loader import _ModeIterator, _Sequential
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor
from torch.optim import LBFGS, Optimizer
from torch.optim.optimizer import _global_optimizer_pre_hooks

TRANSFERS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
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


class StepLoop(_TrainingEpochLoop):
    """Lightning's epoch loop, which returns to Lightning after `steps_per_call` batches at most: None is as many as
    there are until something is due, 1 takes all of Lightning's own steps.
    """

    steps_per_call: int | None = None
    _steps: "_Steps | None" = None

    def on_run_start(self, data_fetcher: _DataFetcher) -> None:
        super().on_run_start(data_fetcher)
        self._steps = None if self.steps_per_call == 1 else _Steps.found(self, data_fetcher)

    def advance(self, data_fetcher: _DataFetcher) -> None:
        """Trains on the batches up to the next place at which Lightning has something to do.

        Raises:
            StopIteration: there is none left, or the module skips the rest of the epoch.
        """
        steps = self._steps
        if steps is None:
            super().advance(data_fetcher)
            return
        resumed = self._restarting or self._loaded_from_state_dict or self._resuming_from_checkpoint
        if self._restarting and self._should_check_val_fx(data_fetcher):  # the checkpoint is one of a validation
            if self.val_loop.restarted_mid_evaluation:
                return
            if self.restarted_on_last:
                self._skip_next_val = True
                return
            self.val_loop.increment_progress_to_evaluation_end()
        self.val_loop.restarting = False
        left = 1 if resumed else self._batches_left()
        while True:
            steps.step()
            left -= 1
            if left <= 0 or self._due(data_fetcher):
                return

    def _batches_left(self) -> float:
        """Until the next validation within the epoch, or return to Lightning."""
        trainer: Any = self.trainer
        most = self.steps_per_call or float("inf")
        if not self._should_check_val_epoch():
            return most
        every = trainer.val_check_batch
        if every == float("inf"):
            every = trainer.limit_train_batches if isinstance(trainer.limit_train_batches, int) else float("inf")
        if trainer._val_check_time_interval is not None:
            return 1
        if every in (None, float("inf")):
            return most
        done = self.total_batch_idx if trainer.check_val_every_n_epoch is None else self.batch_idx
        return min(most, every - (done + 1) % every)

    def _due(self, data_fetcher: _DataFetcher) -> bool:
        """Whether Lightning has to look at the batch that has just ended."""
        trainer = self.trainer
        return (
            data_fetcher.done
            or trainer.should_stop
            or trainer._signal_connector.received_sigterm
            or 0 <= self.max_steps <= self.global_step
        )


class EvaluationLoop(_EvaluationLoop):
    """Lightning's loop of validation and test, likewise."""

    _batches: "_Batches | None" = None

    def on_run_start(self) -> None:
        super().on_run_start()
        trainer: Any = self.trainer
        several = self._is_sequential and self.num_dataloaders > 1
        lean = type(self._data_fetcher) is _PrefetchDataFetcher and type(trainer.profiler) is PassThroughProfiler
        self._batches = None
        if lean and not several and trainer.fit_loop.epoch_loop.steps_per_call != 1:
            split = "test" if trainer.testing else "validation"
            names = (f"on_{split}_batch_start", f"on_{split}_batch_end")
            self._batches = _Batches(trainer, self._results, names, f"{split}_step")

    def _evaluation_step(self, batch: Any, batch_idx: int, dataloader_idx: int, dataloader_iter: Any) -> None:
        batches = self._batches
        if batches is None or dataloader_idx:
            super()._evaluation_step(batch, batch_idx, dataloader_idx, dataloader_iter)
            return
        progress, (start, end) = self.batch_progress, batches.hooks
        batch = batches.moved(batch)
        progress.increment_ready()
        batches.begin(batch)
        batches.call(start, batch, batch_idx)
        progress.increment_started()
        module = batches.module
        module.__dict__["_current_fx_name"] = batches.step_name
        step = getattr(batches.strategy, batches.step_name)
        output = step(batch, batch_idx) if batches.takes_index else step(batch)
        module.__dict__["_current_fx_name"] = None
        progress.increment_processed()
        batches.call(end, output, batch, batch_idx)
        logged = batches.end()
        progress.increment_completed()
        if not self.trainer.sanity_checking:
            self._has_run = True
            if logged:
                batches.connector.update_eval_step_metrics(self._seen_batches_per_dataloader[dataloader_idx])
            self._seen_batches_per_dataloader[dataloader_idx] += 1
        if not progress.is_last_batch and self.trainer.received_sigterm:
            raise SIGTERMException


class _Batches:
    """What both loops do with a batch beside its step: who wants to be called, and where it has to be."""

    def __init__(self, trainer: Trainer, results: Any, hooks: tuple[str, ...], step: str) -> None:
        module = trainer.lightning_module
        self.module, self.results = module, results
        self.trainer: Any = trainer
        self.connector, self.strategy = trainer._logger_connector, trainer.strategy
        self.precision, self.device = trainer.precision_plugin, trainer.strategy.root_device
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]  # a connector sets it
        self.hooks = {name: _overriding(callbacks, name) for name in hooks}
        self.own = {name: getattr(module, name) for name in hooks if _overrides(module, name, LightningModule)}
        self.converts = type(self.precision).convert_input is not Precision.convert_input
        data = trainer.datamodule  # type: ignore[attr-defined]
        places = [module] if data is None else [module, data]
        self.moves = any(_overrides(place, name, LightningModule) for place in places for name in TRANSFERS)
        self.step_name = step
        self.takes_index = is_param_in_hook_signature(getattr(module, step), "batch_idx", min_args=2)

    def moved(self, batch: Any) -> Any:
        """The batch in the net's number format and on its device."""
        if self.converts:
            batch = self.precision.convert_input(batch)
        if not self.moves and _is_on(batch, self.device):
            return batch
        batch = self.module._on_before_batch_transfer(batch, dataloader_idx=0)
        return call._call_strategy_hook(self.trainer, "batch_to_device", batch, dataloader_idx=0)

    def begin(self, batch: Any) -> None:
        """`_LoggerConnector.on_batch_start`."""
        self.connector._first_loop_iter = self.connector._first_loop_iter is None
        results = self.results
        results.batch, results.batch_size, results.dataloader_idx = batch, None, None

    def end(self) -> bool:
        """`_LoggerConnector.on_batch_end`; whether anything was logged."""
        results = self.results
        logged = not all(one.has_reset for one in results.values())  # a key stays for the next epoch
        if logged:
            self.connector.on_batch_end()
        else:
            results.batch = results.batch_size = None
        return logged

    def call(self, name: str, *args: Any) -> Any:
        """The hooks of this name, of callbacks and then of the module, whose answer it returns."""
        found, own = self.hooks[name], self.own.get(name)
        if not found and own is None:
            return None
        trainer, module = self.trainer, self.module
        before = module.__dict__["_current_fx_name"]
        module.__dict__["_current_fx_name"] = name
        for hook in found:
            hook(trainer, module, *args)
        answer = own(*args) if own is not None else None
        module.__dict__["_current_fx_name"] = before
        return answer


class _Steps(_Batches):
    """The steps of an epoch, and what of Lightning's each has to go through."""

    def __init__(self, loop: StepLoop, fetcher: _PrefetchDataFetcher) -> None:
        trainer = loop.trainer
        super().__init__(trainer, loop._results, HOOKS, "training_step")
        self.loop, self.fetcher = loop, fetcher
        self.progress: Any = loop.batch_progress
        self.optimization: Any = loop.automatic_optimization
        self.optimizer: Optimizer = trainer.optimizers[0]
        self.every: int = trainer.accumulate_grad_batches
        self.iterator = _only_iterator(fetcher)
        self.fetched = vars(loop).get("_on_before_fetch")
        self.broadcasts = trainer.world_size > 1 and not _agrees(trainer.callbacks)  # type: ignore[attr-defined]
        module, strategy, precision = self.module, self.strategy, self.precision
        own = any(_overrides(module, name, LightningModule) for name in MODULES)
        self.plain = _plain(strategy) and _plain_precision(precision) and not own
        self.direct = type(precision) is Precision and strategy.model is module
        self.whole: Any = vars(module).get("whole_step")
        if self.whole is not None:
            self.whole.bind(trainer)
            assert self.plain
            hooks = [getattr(callback, "on_whole_step", None) for callback in trainer.callbacks]  # type: ignore[attr-defined]
            self.after_whole = [hook for hook in hooks if hook is not None]
        self.needs_closure = _needs_closure(self.optimizer)
        self.schedules: list[Any] = [
            one for one in trainer.lr_scheduler_configs if one.interval == "step" and not one.reduce_on_plateau
        ]
        self.own_schedule = _overrides(module, "lr_scheduler_step", LightningModule)

    @classmethod
    def found(cls, loop: StepLoop, fetcher: _DataFetcher) -> "_Steps | None":
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

    # -- a batch

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

    def _schedule(self, index: int) -> None:
        loop = self.loop
        if self.schedules and not (self.every > 1 and loop._should_accumulate()):
            for one in self.schedules:
                if (index + 1) % one.frequency:
                    continue
                loop.scheduler_progress.increment_ready()
                if self.own_schedule:
                    call._call_lightning_module_hook(self.trainer, "lr_scheduler_step", one.scheduler, None)
                else:
                    one.scheduler.step()
                loop.scheduler_progress.increment_completed()
        if loop._num_ready_batches_reached():
            loop.update_lr_schedulers("epoch", update_plateau_schedulers=False)

    # -- an optimizer step

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
        if self.whole is not None and self.whole.ready:
            loss = self.whole(batch)
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
            self.optimizer.step()
        progress.total.completed += 1
        progress.current.completed += 1
        return outputs

    def _before_step(self) -> None:
        self.call("on_before_optimizer_step", self.optimizer)
        value = self.trainer.gradient_clip_val
        if value:
            how = self.trainer.gradient_clip_algorithm
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
        if index % self.every == 0:
            zeroed = self.optimization.optim_progress.optimizer.zero_grad
            zeroed.total.ready += 1
            zeroed.current.ready += 1
            self.call("on_before_zero_grad", self.optimizer)
            zeroed.total.started += 1
            zeroed.current.started += 1
            self.optimizer.zero_grad()
            zeroed.total.completed += 1
            zeroed.current.completed += 1
        if loss is not None:
            self.call("on_before_backward", loss)
            loss.backward()
            self.call("on_after_backward")
        return loss, shown

    def _other_output(self, output: Any) -> tuple[Tensor | None, dict[str, Any]]:
        """What Lightning makes of a dict, of None, and of what it refuses."""
        if output is None and self.trainer.world_size > 1:
            raise RuntimeError("training_step has returned None, which skips a step: other processes wait in it.")
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


def _overrides(part: Any, name: str, base: type) -> bool:
    return name in vars(part) or getattr(type(part), name) is not getattr(base, name)


def _overriding(callbacks: list[Callback], name: str) -> list[Callable[..., Any]]:
    found = [getattr(callback, name) for callback in callbacks if _overrides(callback, name, Callback)]
    return [hook for hook in found if callable(hook)]


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


def _is_on(batch: Any, device: torch.device) -> bool:
    parts = batch if type(batch) in (tuple, list) else (batch,)
    return all(type(part) is Tensor and part.device == device for part in parts)
