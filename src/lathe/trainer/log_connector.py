"""`self.log` at optimizer steps, in a run that was interrupted as in one that was not.

Lightning 2.6 counts its own steps for loggers: one less than the optimizer's during a step, in the validation after it
and in `LearningRateMonitor`, and the number of the batch in a validation. It writes a step's values after checkpoints
are written, and forgets the means of an epoch that was interrupted.
"""

from collections.abc import Iterable
from operator import attrgetter
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import LearningRateMonitor
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
from lathe.tasks.metric_state import load_metric_state, metric_state

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


class LogConnector(_LoggerConnector):
    """Writes at every `log_every_n_steps` optimizer steps, each value once."""

    def __init__(self, trainer: Trainer) -> None:
        super().__init__(trainer)
        self._written: tuple[int, dict[str, Any]] = (-1, {})
        self.batch_began_at: int | None = None  # the optimizer step, under manual optimization
        self._groups: list[tuple[dict[str, Any], dict[str, Any]]] = []  # with their settings when the batch began

    def synchronise(self, names: Iterable[str]) -> None:
        """Reduce the epoch values of these metrics over all ranks, also where a module logs them without `sync_dist`.

        A decision that follows rank 0's part alone would depend on the number of devices.
        """
        loop, metrics = self.trainer.fit_loop.epoch_loop, {name.partition("/dataloader_idx_")[0] for name in names}
        for results in (loop._results, loop.val_loop._results):
            if isinstance(results, LoggedResults) and self.trainer.world_size > 1:
                results.synchronised = metrics

    @property
    def should_update_logs(self) -> bool:
        trainer: Any = self.trainer
        # Not at a stop, as Lightning does: a resumed run has no such row.
        if trainer.state.stage is RunningStage.TRAINING and trainer.log_every_n_steps:
            loop = trainer.fit_loop.epoch_loop
            if self.batch_began_at is not None:
                return not loop.in_batch and reached(trainer, trainer.log_every_n_steps)
            step = loop._batches_that_stepped
            return step % trainer.log_every_n_steps == 0 and not trainer.fit_loop._should_accumulate()
        return super().should_update_logs

    def on_batch_start(self, batch: Any, dataloader_idx: int | None = None) -> None:
        super().on_batch_start(batch, dataloader_idx)
        trainer: Any = self.trainer
        if trainer.state.stage is RunningStage.TRAINING and not trainer.lightning_module.automatic_optimization:
            self.batch_began_at = trainer.global_step
            self._groups = [
                (group, {name: _copied(value) for name, value in group.items() if name != "params"})
                for optimizer in trainer.optimizers
                for group in optimizer.param_groups
            ]

    def update_train_step_metrics(self) -> None:
        if self.batch_began_at is not None and self.should_update_logs:
            self._log_manual_rates()
        super().update_train_step_metrics()

    def _log_manual_rates(self) -> None:
        """Under manual optimization, have `LearningRateMonitor` log a step's rates as they were when it began."""
        groups, self._groups = self._groups, []
        now = [dict(group) for group, _ in groups]
        try:
            for group, before in groups:
                group.update(before)
            for monitor in self.trainer.callbacks if groups else ():  # type: ignore[attr-defined]
                if isinstance(monitor, LearningRateMonitor):
                    LearningRateMonitor.on_train_batch_start(monitor, self.trainer)
        finally:
            for (group, _), after in zip(groups, now, strict=True):
                group.update(after)

    def update_eval_step_metrics(self, step: int) -> None:
        super().update_eval_step_metrics(self.trainer.fit_loop.epoch_loop._batches_that_stepped)

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        now = self.trainer.global_step if step is None else step
        if self._written[0] != now:
            self._written = (now, {})
        fresh = {name: value for name, value in metrics.items() if not _equal(self._written[1].get(name), value)}
        if self._first_loop_iter is not None and self.trainer.evaluating:
            _report_last_batch(fresh.keys() & self._written[1].keys())
        self._written[1].update(fresh)
        # Lightning counts on after the last epoch; the row belongs to that epoch.
        if fresh and self.trainer.state.fn != "fit":
            epochs: Any = self.trainer.fit_loop.epoch_progress.current
            fresh.setdefault("epoch", max(0, epochs.processed - 1))
        super().log_metrics(fresh, step)

    def flush(self) -> None:
        """Write what training has logged for this step or epoch, before a checkpoint: a resumed run logs it no more."""
        if not self.trainer.training or self.trainer._results is None:
            return
        if self._first_loop_iter is None:
            self.log_metrics(self.metrics["log"])
        else:
            self.update_train_step_metrics()

    def state(self, module: LightningModule) -> dict[str, Any]:
        """Return this rank's values logged so far and its torchmetrics' states: plain values and CPU tensors."""
        results: Any = self.trainer.fit_loop.epoch_loop._results
        epoch_ends = self.trainer.training and self._first_loop_iter is None
        entries = {} if epoch_ends else {key: item for key, item in results.items() if not item.has_reset}
        reset_soon = {id(item.value) for item in results.values() if not item.is_tensor} if epoch_ends else set()
        step, written = self._written
        return {
            # A validation during accumulation has the step of the one before, and logs the same.
            "written": [step, {name: value.cpu() for name, value in written.items() if isinstance(value, Tensor)}],
            "entries": {key: _entry(item) for key, item in entries.items()},
            "metrics": {
                name: metric_state(metric) for name, metric in _metrics(module).items() if id(metric) not in reset_soon
            },
        }

    def restore(self, module: LightningModule, saved: dict[str, Any]) -> None:
        """Load what `state` returned, at the start of training."""
        if "written" in saved:
            step, written = saved["written"]
            self._written = (step, {name: value.to(module.device) for name, value in written.items()})
        metrics = _metrics(module)
        for name, state in saved["metrics"].items():
            if name in metrics:
                load_metric_state(metrics[name], state)
        results: Any = self.trainer.fit_loop.epoch_loop._results
        if not saved["entries"]:
            return
        for key, plain in saved["entries"].items():
            meta = _Metadata(**{name: plain[name] for name in FIELDS}, reduce_fx=plain["reduce_fx"])
            meta.sync = _Sync(_should=plain["sync"], fn=self.trainer.strategy.reduce, rank_zero_only=plain["alone"])
            item = LoggedEntry(meta, plain["metric_attribute"] is None)
            if plain["metric_attribute"] is not None:
                item.value = attrgetter(plain["metric_attribute"])(module)
            for name in ("value", "cumulated_batch_size", "_forward_cache"):
                if plain[name] is not None:
                    setattr(item, name, plain[name].to(module.device))
            item._update_count = 1
            results[key] = item
            results.restored.add(key)
        self._first_loop_iter = False  # the epoch continues: the next batch is not its first


class LoggedEntry(_ResultMetric):
    """An entry of Lightning's table that moves only when its device changes.

    `self.log` asks for the move at each call, which takes five sixths of the call's time.
    """

    _device: Any = None

    def to(self, *device: Any, **kwargs: Any) -> Any:
        if device != self._device:
            super().to(*device, **kwargs)
            self._device = device
        return self


class LoggedResults(_ResultCollection):
    """Lightning's table of logged values, which a checkpoint can fill before anything is logged.

    Samples are counted in floats: the mean of Lightning's integers over ranks loses a half where they have different
    shares of the last batch.
    """

    def __init__(self, training: bool) -> None:
        super().__init__(training)
        self.restored: set[str] = set()  # keys of entries from a checkpoint that nothing was added to
        self._replaced: _ResultMetric | None = None
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
        super().__setitem__(key, item if isinstance(item, LoggedEntry) else LoggedEntry(item.meta, item.is_tensor))

    def log(self, fx: str, name: str, *args: Any, **kwargs: Any) -> None:
        key = f"{fx}.{name}"
        # The new entry gets the settings of this call and the restored value.
        self._replaced = self.pop(key) if key in self.restored else None
        self.restored.discard(key)
        super().log(fx, name, *args, **kwargs)

    def update_metrics(self, key: str, value: Any, batch_size: int) -> None:
        old, self._replaced = self._replaced, None
        item = self[key]
        if old is not None and old.is_tensor and item.is_tensor:
            for name in ("value", "cumulated_batch_size"):
                if hasattr(old, name):
                    setattr(item, name, getattr(old, name).to(item.value.device))
        if item.is_tensor and item.meta.is_mean_reduction:
            item.cumulated_batch_size = item.cumulated_batch_size.to(item.value.dtype)
        super().update_metrics(key, value, batch_size)


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value  # a rate that is a tensor changes in place


def _entry(item: _ResultMetric) -> dict[str, Any]:
    plain: dict[str, Any] = {name: getattr(item.meta, name) for name in FIELDS}
    plain |= {
        "reduce_fx": item.meta.reduce_fx.__name__,
        "sync": item.meta.sync.should,
        "alone": item.meta.sync.rank_zero_only,
    }
    for name in ("value", "cumulated_batch_size", "_forward_cache"):
        value = getattr(item, name, None)
        plain[name] = value.detach().cpu().clone() if isinstance(value, Tensor) else None
    return plain


def _metrics(module: LightningModule) -> dict[str, Metric]:
    return {name: part for name, part in module.named_modules() if isinstance(part, Metric)}


def _equal(left: Any, right: Any) -> bool:
    both = isinstance(left, Tensor) and isinstance(right, Tensor) and left.device == right.device
    return both and torch.equal(left, right)


_reported: set[str] = set()


@rank_zero_only
def _report_last_batch(names: Iterable[str]) -> None:
    """Print once for each metric that an evaluation logs batch by batch: metrics.csv has one row for it."""
    for name in sorted(set(names) - _reported):
        _reported.add(name)
        print(
            f"self.log({name.removesuffix('_step')!r}, on_step=True) in an evaluation: metrics.csv has one row for it, "
            "that of the optimizer step, which keeps the last batch's value; on_epoch=True keeps the mean.",
            flush=True,
        )
