"""What `self.log` writes: in the row of its optimizer step, and the same in a run that was interrupted.

Lightning 2.6 counts its own steps for loggers: one less than the optimizer's while a step is under way, in the
validation after it and in `LearningRateMonitor`, and the number of a validation batch in a validation. It writes a
step's values after checkpoints are, and forgets the means of an epoch that was interrupted. The three parts here
replace those of a Trainer, and are all that knows its inner names.
"""

import re
import warnings
from collections.abc import Iterable
from operator import attrgetter
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.connectors.logger_connector import _LoggerConnector
from lightning.pytorch.trainer.connectors.logger_connector.result import (
    _Metadata,
    _ResultCollection,
    _ResultMetric,
    _Sync,
)
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor
from torchmetrics import Metric

from lathe.data.steps import reached
from lathe.tasks.loops import EvaluationLoop, FitLoop, Optimization, StepLoop
from lathe.tasks.manual import Rates

FIELDS = (
    "fx",
    "name",
    "prog_bar",
    "logger",
    "on_step",
    "on_epoch",
    "enable_graph",
    "add_dataloader_idx",
    "metric_attribute",
)


def install(trainer: Trainer) -> None:
    """Replaces the Trainer's parts, once; a Trainer that is training already keeps its own."""
    if isinstance(trainer._logger_connector, _Steps):
        return
    trainer._logger_connector = _Steps(trainer)
    trainer.fit_loop.__class__ = FitLoop
    loop = trainer.fit_loop.epoch_loop
    loop.__class__ = _EpochLoop  # a new one would not know the data, which are attached by now
    loop.automatic_optimization.__class__ = Optimization
    loop._results = _Results(training=True)
    for evaluation in (loop.val_loop, trainer.validate_loop, trainer.test_loop):
        evaluation.__class__ = EvaluationLoop
        evaluation._results = _Results(training=False)


def synchronise(trainer: Trainer, names: Iterable[str]) -> None:
    """Have epoch values of these metrics be those of all ranks, also where a module logs them without `sync_dist`: a
    decision that follows rank 0's part alone would depend on the number of devices."""
    loop, found = trainer.fit_loop.epoch_loop, {name.partition("/dataloader_idx_")[0] for name in names}
    for results in (loop._results, loop.val_loop._results):
        if isinstance(results, _Results) and trainer.world_size > 1:
            results.synchronised = found


def silence(names: Iterable[str]) -> None:
    """Keeps Lightning from advising that ranks be added up for these."""
    either = "|".join(map(re.escape, names))
    warnings.filterwarnings("ignore", message=rf".*recommended to use `self\.log\('({either})', .*sync_dist=True")


class _EpochLoop(StepLoop):
    """Whose `_batches_that_stepped`, the step that loggers are given, is the optimizer's: of the step under way, or
    else of the last.
    """

    @property
    def under_way(self) -> bool:
        """Whether a batch has begun whose step is not made."""
        batches: Any = self.batch_progress.current
        return bool(batches.ready > batches.processed)

    @property
    def _batches_that_stepped(self) -> int:
        return self.global_step + int(self.under_way)

    @_batches_that_stepped.setter
    def _batches_that_stepped(self, value: int) -> None:
        """Nothing: Lightning's own count."""


class _Steps(_LoggerConnector):
    """Writes at every `log_every_n_steps` optimizer steps, each value once."""

    def __init__(self, trainer: Trainer) -> None:
        super().__init__(trainer)
        self._written: tuple[int, dict[str, Any]] = (-1, {})
        self.batch_began_at: int | None = None  # the optimizer step, where a module makes its steps itself
        self._rates = Rates()

    @property
    def should_update_logs(self) -> bool:
        trainer: Any = self.trainer
        # not at a stop as well: a continued run has no such row
        if trainer.state.stage is RunningStage.TRAINING and trainer.log_every_n_steps:
            loop = trainer.fit_loop.epoch_loop
            if self.batch_began_at is not None:
                return not loop.under_way and reached(trainer, trainer.log_every_n_steps)
            step = loop._batches_that_stepped
            return step % trainer.log_every_n_steps == 0 and not trainer.fit_loop._should_accumulate()
        return super().should_update_logs

    def on_batch_start(self, batch: Any, dataloader_idx: int | None = None) -> None:
        super().on_batch_start(batch, dataloader_idx)
        trainer: Any = self.trainer
        if trainer.state.stage is RunningStage.TRAINING and not trainer.lightning_module.automatic_optimization:
            self.batch_began_at = trainer.global_step
            self._rates.note(trainer)

    def update_train_step_metrics(self) -> None:
        if self.batch_began_at is not None and self.should_update_logs:
            self._rates.log(self.trainer)
        super().update_train_step_metrics()

    def update_eval_step_metrics(self, step: int) -> None:
        super().update_eval_step_metrics(self.trainer.fit_loop.epoch_loop._batches_that_stepped)

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        now = self.trainer.global_step if step is None else step
        if self._written[0] != now:
            self._written = (now, {})
        fresh = {name: value for name, value in metrics.items() if not _equal(self._written[1].get(name), value)}
        if self._first_loop_iter is not None and self.trainer.evaluating:
            _tell_last(fresh.keys() & self._written[1].keys())
        self._written[1].update(fresh)
        # the row of the last step: Lightning counts on after its epoch, if it saw the end
        if fresh and self.trainer.state.fn != "fit":
            epochs: Any = self.trainer.fit_loop.epoch_progress.current
            fresh.setdefault("epoch", max(0, epochs.processed - 1))
        super().log_metrics(fresh, step)

    def flush(self) -> None:
        """Writes now what training has logged for this step or epoch, which a run that continues here would not log
        again.
        """
        if not self.trainer.training or self.trainer._results is None:
            return
        if self._first_loop_iter is None:
            self.log_metrics(self.metrics["log"])
        else:
            self.update_train_step_metrics()


_TOLD: set[str] = set()


@rank_zero_only
def _tell_last(names: Iterable[str]) -> None:
    """Once of each metric that an evaluation logs batch by batch, where metrics.csv has one row."""
    for name in sorted(set(names) - _TOLD):
        _TOLD.add(name)
        print(
            f"self.log({name.removesuffix('_step')!r}, on_step=True) in an evaluation: metrics.csv has one row for it, "
            "that of the optimizer step, which keeps the last batch's value; on_epoch=True keeps the mean.",
            flush=True,
        )


def _equal(left: Any, right: Any) -> bool:
    both = isinstance(left, Tensor) and isinstance(right, Tensor) and left.device == right.device
    return both and torch.equal(left, right)


class _Logged(_ResultMetric):
    """An entry of Lightning's table, moved where values come from another device than before: `self.log` asks for it
    each time, which looks through all that it holds, for five sixths of the time of a call."""

    _where: Any = None

    def to(self, *device: Any, **kwargs: Any) -> Any:
        if device != self._where:
            super().to(*device, **kwargs)
            self._where = device
        return self


class _Results(_ResultCollection):
    """Lightning's table of logged values, which can be filled from a checkpoint before anything is logged.

    Samples are counted in floats: Lightning's count is an integer, whose mean over ranks loses a half where they have
    different shares of the last batch.
    """

    def __init__(self, training: bool) -> None:
        super().__init__(training)
        self._restored: set[str] = set()
        self._waiting: _ResultMetric | None = None
        self.synchronised: set[str] = set()  # whose epoch values are reduced over ranks in any case

    def _get_cache(self, result_metric: _ResultMetric, on_step: bool) -> Tensor | None:  # type: ignore[override]
        meta = result_metric.meta
        if on_step or meta.sync.should or not {meta.name, meta.forked_name(on_step=False)} & self.synchronised:
            return super()._get_cache(result_metric, on_step)
        meta.sync.should = True
        try:
            return super()._get_cache(result_metric, on_step)
        finally:
            meta.sync.should = False

    def __setitem__(self, key: str, item: _ResultMetric) -> None:
        super().__setitem__(key, item if isinstance(item, _Logged) else _Logged(item.meta, item.is_tensor))

    def log(self, fx: str, name: str, *args: Any, **kwargs: Any) -> None:
        key = f"{fx}.{name}"
        # the entry gets the settings of this call, and what was restored for it
        old = self.pop(key) if key in self._restored else None
        self._restored.discard(key)
        self._waiting = old
        super().log(fx, name, *args, **kwargs)

    def update_metrics(self, key: str, value: Any, batch_size: int) -> None:
        old, self._waiting = self._waiting, None
        if old is not None and old.is_tensor and self[key].is_tensor:
            device = self[key].value.device
            for name in ("value", "cumulated_batch_size"):
                if hasattr(old, name):
                    setattr(self[key], name, getattr(old, name).to(device))
        item = self[key]
        if item.is_tensor and item.meta.is_mean_reduction:
            item.cumulated_batch_size = item.cumulated_batch_size.to(item.value.dtype)
        super().update_metrics(key, value, batch_size)


def states(trainer: Trainer, task: LightningModule) -> dict[str, Any]:
    """This rank's logged values under way, and the states of the task's torchmetrics: plain values and tensors on the
    CPU.
    """
    connector, results = trainer._logger_connector, trainer.fit_loop.epoch_loop._results
    epoch_ends = trainer.training and connector._first_loop_iter is None
    entries = {} if epoch_ends else {key: item for key, item in results.items() if not item.has_reset}
    reset_soon = {id(item.value) for item in results.values() if not item.is_tensor} if epoch_ends else set()
    step, written = getattr(connector, "_written", (-1, {}))
    return {
        # a validation amid accumulation comes at the step of the one before, and says the same of the same weights
        "written": [step, {name: value.cpu() for name, value in written.items() if isinstance(value, Tensor)}],
        "entries": {key: _entry(item) for key, item in entries.items()},
        "metrics": {name: state_of(metric) for name, metric in _metrics(task).items() if id(metric) not in reset_soon},
    }


def _entry(item: _ResultMetric) -> dict[str, Any]:
    plain: dict[str, Any] = {name: getattr(item.meta, name) for name in FIELDS}
    plain |= {
        "reduce_fx": item.meta.reduce_fx.__name__,
        "sync": item.meta.sync.should,
        "alone": item.meta.sync.rank_zero_only,
    }
    for name in ("value", "cumulated_batch_size", "_forward_cache"):
        found = getattr(item, name, None)
        plain[name] = found.detach().cpu().clone() if isinstance(found, Tensor) else None
    return plain


def restore(trainer: Trainer, task: LightningModule, saved: dict[str, Any]) -> None:
    """Puts back what `states` gave, at the start of training."""
    connector = trainer._logger_connector
    if isinstance(connector, _Steps) and "written" in saved:  # not in checkpoints of earlier versions
        step, written = saved["written"]
        connector._written = (step, {name: value.to(task.device) for name, value in written.items()})
    metrics = _metrics(task)
    for name, state in saved["metrics"].items():
        if name in metrics:
            load_state(metrics[name], state)
    results = trainer.fit_loop.epoch_loop._results
    if not saved["entries"] or not isinstance(results, _Results):
        return
    for key, plain in saved["entries"].items():
        meta = _Metadata(**{name: plain[name] for name in FIELDS}, reduce_fx=plain["reduce_fx"])
        meta.sync = _Sync(_should=plain["sync"], fn=trainer.strategy.reduce, rank_zero_only=plain["alone"])
        item = _Logged(meta, plain["metric_attribute"] is None)
        if plain["metric_attribute"] is not None:
            item.value = attrgetter(plain["metric_attribute"])(task)
        for name in ("value", "cumulated_batch_size", "_forward_cache"):
            if plain[name] is not None:
                setattr(item, name, plain[name].to(task.device))
        item._update_count = 1
        results[key] = item
        results._restored.add(key)
    connector._first_loop_iter = False  # the epoch goes on: its first batch here is not its first


def _metrics(task: LightningModule) -> dict[str, Metric]:
    return {name: module for name, module in task.named_modules() if isinstance(module, Metric)}


def state_of(metric: Metric) -> dict[str, Any]:
    """A torchmetric's states: plain values and tensors on the CPU."""
    values = {name: getattr(metric, name) for name in metric._defaults}
    return {
        "count": metric._update_count,
        "values": {
            name: [part.detach().cpu().clone() for part in value]
            if isinstance(value, list)
            else value.detach().cpu().clone()
            for name, value in values.items()
        },
    }


def load_state(metric: Metric, state: dict[str, Any]) -> None:
    """Puts back what `state_of` gave."""
    metric._update_count, metric._computed = state["count"], None
    for name, value in state["values"].items():
        here = [part.to(metric.device) for part in value] if isinstance(value, list) else value.to(metric.device)
        setattr(metric, name, here)
