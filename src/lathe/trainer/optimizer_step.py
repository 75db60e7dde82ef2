"""One optimizer step, with Lightning's hooks and counters and without its overhead.

Lightning 2.6 spends about 0.25 ms around a step: profiler contexts, batch transfers, empty
hooks, tables of metrics. Here only what is overridden is called, in Lightning's order and with its counters.
"""

from collections import OrderedDict
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loops.fetchers import _PrefetchDataFetcher
from lightning.pytorch.loops.utilities import _block_parallel_sync_behavior
from lightning.pytorch.plugins import MixedPrecision, Precision
from lightning.pytorch.strategies import DDPStrategy, Strategy
from lightning.pytorch.trainer import call
from lightning.pytorch.utilities.combined_loader import _ModeIterator, _Sequential
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor
from torch.optim import LBFGS, Optimizer
from torch.optim.optimizer import _global_optimizer_pre_hooks

from lathe.data.transfer import HOOKS as TRANSFER_HOOKS
from lathe.errors import UserError, require
from lathe.optim.short import short_schedule, short_step, short_zero_grad

# called for each training batch
HOOKS = (
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
)
# A module, strategy or precision that overrides one of these makes its steps in Lightning's way.
MODULE_STEP = ("backward", "optimizer_step", "optimizer_zero_grad", "configure_gradient_clipping")
STRATEGY_STEP = ("training_step", "backward", "pre_backward", "post_backward", "optimizer_step", "on_train_batch_start")
PRECISION_STEP = ("pre_backward", "backward", "post_backward", "optimizer_step", "_after_closure", "_wrap_closure")


class BatchHooks:
    """Transfer of a batch and calls of the overridden hooks around its step, for training and evaluation."""

    def __init__(self, trainer: Trainer, results: Any, hooks: tuple[str, ...], step: str) -> None:
        module = trainer.lightning_module
        self.module, self.results = module, results
        self.trainer: Any = trainer
        self.connector, self.strategy = trainer._logger_connector, trainer.strategy
        self.precision, self.device = trainer.precision_plugin, trainer.strategy.root_device
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]  # a connector sets it
        self.callback_hooks = {name: overriding(callbacks, name) for name in hooks}
        self.module_hooks = {name: getattr(module, name) for name in hooks if overrides(module, name, LightningModule)}
        self.converts = type(self.precision).convert_input is not Precision.convert_input
        data = trainer.datamodule  # type: ignore[attr-defined]
        owners = [module] if data is None else [module, data]
        self.transfers = any(overrides(owner, name, LightningModule) for owner in owners for name in TRANSFER_HOOKS)
        self.step_name = step
        self.takes_index = is_param_in_hook_signature(getattr(module, step), "batch_idx", min_args=2)

    def to_device(self, batch: Any) -> Any:
        """Return the batch in the precision's number format, on the device."""
        if self.converts:
            batch = self.precision.convert_input(batch)
        if not self.transfers and is_on(batch, self.device):
            return batch
        batch = self.module._on_before_batch_transfer(batch, dataloader_idx=0)
        return call._call_strategy_hook(self.trainer, "batch_to_device", batch, dataloader_idx=0)

    def start_results(self, batch: Any) -> None:
        """Do what `_LoggerConnector.on_batch_start` does."""
        self.connector._first_loop_iter = self.connector._first_loop_iter is None
        results = self.results
        results.batch, results.batch_size, results.dataloader_idx = batch, None, None

    def end_results(self) -> bool:
        """Do what `_LoggerConnector.on_batch_end` does; return whether anything was logged."""
        results = self.results
        logged = not all(one.has_reset for one in results.values())  # a key stays for the next epoch
        if logged:
            self.connector.on_batch_end()
        else:
            results.batch = results.batch_size = None
        return logged

    def call(self, name: str, *args: Any) -> Any:
        """Call the callbacks' hooks of this name, then the module's; return the module's answer."""
        hooks, own = self.callback_hooks[name], self.module_hooks.get(name)
        if not hooks and own is None:
            return None
        trainer, module = self.trainer, self.module
        before = module.__dict__["_current_fx_name"]
        module.__dict__["_current_fx_name"] = name
        for hook in hooks:
            hook(trainer, module, *args)
        answer = own(*args) if own is not None else None
        module.__dict__["_current_fx_name"] = before
        return answer


class OptimizerStep(BatchHooks):
    """Makes the steps of an epoch one by one.

    `plain`: the step is the module's forward and backward and the optimizer's update, with or without DDP. Otherwise
    Lightning's own optimization runs it, with the hooks around it called from here.
    """

    def __init__(self, loop: Any, fetcher: _PrefetchDataFetcher) -> None:
        trainer = loop.trainer
        super().__init__(trainer, loop._results, HOOKS, "training_step")
        self.loop, self.fetcher = loop, fetcher
        self.progress: Any = loop.batch_progress
        self.optimization: Any = loop.automatic_optimization
        self.counts: Any = self.optimization.optim_progress.optimizer
        self.optimizer: Optimizer = trainer.optimizers[0]
        self.accumulate: int = trainer.accumulate_grad_batches
        self.window = loop.window
        self.iterator = _single_iterator(fetcher)
        self.before_fetch = vars(loop).get("_on_before_fetch")
        # A callback with `stops_all` has all processes agree on a stop; else Lightning asks them at every batch.
        agreed = any(getattr(callback, "stops_all", False) for callback in trainer.callbacks)
        self.broadcasts = trainer.world_size > 1 and not agreed
        module = self.module
        self.direct = type(self.precision) is Precision and self.strategy.model is module
        overridden = any(overrides(module, name, LightningModule) for name in MODULE_STEP)
        self.plain = _is_plain(self.strategy, self.precision) and not overridden
        self.compiled: Any = vars(module).get("whole_step")
        if self.compiled is None:
            self.plain = self.plain and not _needs_closure(self.optimizer)
        else:
            self.compiled.bind(trainer)
            require(
                self.plain and self.accumulate == 1,
                "compile.scope=step: the strategy, precision or task has its own step, which a compiled step does not "
                "call. Use compile.scope=net.",
            )
            hooks = [getattr(callback, "on_whole_step", None) for callback in trainer.callbacks]
            self.after_compiled = [hook for hook in hooks if hook is not None]
        self.update, self.zero_grad = short_step(self.optimizer), short_zero_grad(self.optimizer)
        self.schedules: list[tuple[Any, Callable[[], Any]]] = [
            (one, short_schedule(one.scheduler))
            for one in trainer.lr_scheduler_configs
            if one.interval == "step" and not one.reduce_on_plateau
        ]
        self.own_schedule = overrides(module, "lr_scheduler_step", LightningModule)

    def single_step(self) -> None:
        """Do what `_TrainingEpochLoop.advance` does with a batch."""
        loop, progress = self.loop, self.progress
        if self.broadcasts:
            loop._broadcast_sigterm_tensor()
        batch = self._fetch()
        total, current = progress.total, progress.current
        index = current.ready  # before it is counted
        progress.is_last_batch = self.fetcher.done
        batch = self.to_device(batch)
        total.ready += 1
        current.ready += 1
        self.start_results(batch)
        outputs: Any = None
        if batch is None:
            loop._warning_cache.warn("train_dataloader yielded None. If this was on purpose, ignore this warning...")
        else:
            answer = self.call("on_train_batch_start", batch, index)
            if not self.plain:
                call._call_strategy_hook(self.trainer, "on_train_batch_start", batch, index)
            if answer == -1:
                progress.increment_by(0, is_last_batch=True)
                progress.increment_processed()
                self._step_due_schedules(index)
                raise StopIteration
            total.started += 1
            current.started += 1
            if self.plain:
                outputs = self._plain_step(batch, index)
            else:
                kwargs = loop._build_kwargs(OrderedDict(), batch, index)
                outputs = self.optimization.run(self.optimizer, index, kwargs)
        total.processed += 1
        current.processed += 1
        self._step_due_schedules(index)
        self.call("on_train_batch_end", outputs, batch, index)
        logged = self.end_results()
        total.completed += 1
        current.completed += 1
        if logged:
            self.connector.update_train_step_metrics()

    def _fetch(self) -> Any:
        fetcher = self.fetcher
        if self.iterator is None or fetcher.length is None or fetcher.batches:
            return next(fetcher)[0]
        if self.before_fetch is not None:
            self.before_fetch()
        return self.next_batch()

    def next_batch(self) -> Any:
        """Return the next batch of the only loader, whose length is known."""
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

    def _step_due_schedules(self, index: int) -> None:
        loop = self.loop
        if self.schedules and not (self.accumulate > 1 and loop._should_accumulate()):
            self.step_schedules(index)
        if loop._num_ready_batches_reached():
            loop.update_lr_schedulers("epoch", update_plateau_schedulers=False)

    def step_schedules(self, index: int) -> None:
        """Step the schedulers that count optimizer steps."""
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

    def _plain_step(self, batch: Any, index: int) -> dict[str, Any]:
        """Do what `_AutomaticOptimization.run` does."""
        if self.accumulate > 1 and self.loop._should_accumulate():
            with _block_parallel_sync_behavior(self.strategy, block=True), torch.enable_grad():
                return self._forward_and_backward(batch, index)
        progress = self.counts.step
        progress.total.ready += 1
        progress.current.ready += 1
        if self.compiled is not None and self.trainer.global_step:
            outputs = {"loss": self.compiled(batch)}
            self.counts.zero_grad.increment_by(1)
            for hook in self.after_compiled:
                hook(self.trainer, self.module, outputs["loss"])
        else:
            # The first step of a compiled run is eager: the optimizer makes its state in it.
            with nullcontext() if self.compiled is None else torch.compiler.set_stance("force_eager"):
                outputs = self._forward_and_backward(batch, index)
            self.call("on_before_optimizer_step", self.optimizer)
            self.clip()
            self.update()
        progress.total.completed += 1
        progress.current.completed += 1
        return outputs

    def clip(self) -> None:
        """Clip the gradients by `trainer.gradient_clip_val`, if that is set."""
        value, how = self.trainer.gradient_clip_val, self.trainer.gradient_clip_algorithm
        if value:
            self.precision._clip_gradients(self.module, self.optimizer, value, gradient_clip_algorithm=how)

    def _forward_and_backward(self, batch: Any, index: int) -> dict[str, Any]:
        """Compute the gradients; return the step's outputs as hooks get them."""
        module = self.module
        module.__dict__["_current_fx_name"] = "training_step"
        args = (batch, index) if self.takes_index else (batch,)
        output = module.training_step(*args) if self.direct else self.strategy.training_step(*args)
        module.__dict__["_current_fx_name"] = None
        if type(output) is Tensor:
            loss: Tensor | None = output if self.accumulate == 1 else output / self.accumulate
            outputs: dict[str, Any] = {"loss": loss.detach()}  # type: ignore[union-attr]
        else:
            loss, outputs = self._from_other_output(output)
        if self.window is not None:
            loss = self.window.weigh(loss, batch)
        if index % self.accumulate == 0:
            zero_grad = self.counts.zero_grad
            zero_grad.increment_ready()
            self.call("on_before_zero_grad", self.optimizer)
            zero_grad.increment_started()
            self.zero_grad()
            zero_grad.increment_completed()
        if loss is not None:
            self.call("on_before_backward", loss)
            loss.backward()
            self.call("on_after_backward")
        return outputs

    def _from_other_output(self, output: Any) -> tuple[Tensor | None, dict[str, Any]]:
        """Return loss and outputs of a `training_step` that returned a dict or None; Lightning refuses the rest."""
        if output is None and self.trainer.world_size > 1:
            raise UserError(
                f"training_step of {type(self.module).__name__} returned None, which skips a step in one process while "
                "the others wait for it. Return a loss multiplied by 0, or use trainer.devices=1."
            )
        result: Any = self.optimization.output_result_cls.from_training_step_output(output, self.accumulate)
        if result.closure_loss is None:
            self.loop._warning_cache.warn(
                "`training_step` returned `None`. If this was on purpose, ignore this warning..."
            )
        return result.closure_loss, {} if result.loss is None else result.asdict()


def overrides(owner: Any, name: str, base: type) -> bool:
    """Return whether `owner` or its class replaces the method `name` of `base`."""
    return name in vars(owner) or getattr(type(owner), name) is not getattr(base, name)


def overriding(callbacks: list[Callback], name: str) -> list[Callable[..., Any]]:
    """Return the hooks `name` of the callbacks that override it."""
    hooks = [getattr(callback, name) for callback in callbacks if overrides(callback, name, Callback)]
    return [hook for hook in hooks if callable(hook)]


def is_on(batch: Any, device: torch.device) -> bool:
    """Return whether the batch is tensors on the device and nothing else."""
    parts = batch if type(batch) in (tuple, list) else (batch,)
    return all(type(part) is Tensor and part.device == device for part in parts)


def _single_iterator(fetcher: _PrefetchDataFetcher) -> _ModeIterator | None:
    """Return the iterator of batches if there is one loader, whose batches need no combining."""
    combined = fetcher.combined_loader
    iterator = combined._iterator
    alone = len(combined.flattened) == 1 and combined.iterables is combined.flattened[0]
    if not alone or iterator is None or isinstance(iterator, _Sequential) or len(iterator.iterators) != 1:
        return None
    return iterator


def _is_plain(strategy: Strategy, precision: Precision) -> bool:
    """Return whether strategy and precision leave the step to the module, with or without DDP."""
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
