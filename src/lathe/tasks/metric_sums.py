"""Running sums of a task's metrics: added for each batch, reported at logged steps and at the end of epochs."""

import re
import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lathe.data.steps import reached, steps_before
from lathe.errors import require
from lathe.measure.processes import everyones_tensors

if TYPE_CHECKING:
    from lathe.tasks.loss_and_metrics import Meters

MAX_DEFERRED = 64  # batches whose sums are computed together
MAX_NUMBERS = 2**18  # in their outputs


def stacked(loss: Tensor, others: Iterable[Tensor], count: Tensor | int) -> Tensor:
    """Return what `Task.reduce` returns, in float32 at least: the summed loss, other sums and the count."""
    dtype = torch.promote_types(loss.dtype, torch.float32)
    number = count if isinstance(count, Tensor) else torch.full_like(loss, count, dtype=dtype)
    return torch.stack([value.to(dtype) for value in (loss.detach().to(dtype) * number, *others, number)])


class MetricSums(LightningModule):
    """The part of a task that sums its metrics over batches and reports their means.

    Sums stay on the device and are read once per logged step or epoch: a read waits for the device, and metric objects
    per step cost several times the step of a small net. The sums of all ranks are added before they are divided, so
    metrics do not depend on the number of devices. `meters` are torchmetrics, updated with `scored` of every batch.
    """

    metrics: tuple[str, ...]

    def __init__(self) -> None:
        super().__init__()
        self.meters: Meters | None = None
        # Training has two sums: those since the last logged step, and those of the epoch before that.
        self._sums: dict[str, Tensor] = {}
        self._epoch_sums: dict[str, Tensor] = {}
        self._deferred: list[tuple[Any, Any, Tensor]] = []  # outputs, targets and loss of steps not yet in the sums
        self._window_ends: list[int] = []  # places in `_deferred` where a logged window ends
        self._windows: list[Tensor] = []  # sums of ended windows
        self._started = False  # a batch of training was summed directly, which checks `reduce`
        self.step_counts: list[Tensor] | None = None  # counted samples, where batches are weighted by them
        self._logged_step = -1
        self.latest: dict[str, float] = {}  # means of the last logged step
        self._deferred_rows: list[tuple[dict[str, Any], int]] = []  # of logged steps, with their epochs

    # Written by a task, and documented in `Task`.

    @property
    def metric_names(self) -> list[str]:
        raise NotImplementedError

    def reduce(self, outputs: Any, batch: Any, loss: Tensor) -> Tensor:
        raise NotImplementedError

    def reduce_later(self, outputs: Any, batch: Any) -> Any:
        raise NotImplementedError

    def reduce_several(self, deferred: list[tuple[Any, Any, Tensor]]) -> Any:
        raise NotImplementedError

    def scored(self, outputs: Any, batch: Any) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def compute(self, means: dict[str, float]) -> dict[str, float]:
        raise NotImplementedError

    # Sums.

    def add_training(self, outputs: Any, batch: Any, loss: Tensor) -> None:
        """Add the metrics of a training batch; `loss` is detached."""
        counts = self.step_counts
        targets = self.reduce_later(outputs, batch) if self._started and counts is None else None
        if targets is not None:
            outputs = outputs.detach()
            if self._deferred:
                limit = min(MAX_DEFERRED, MAX_NUMBERS // max(1, outputs.numel()))
                if len(self._deferred) >= limit or self._deferred[0][0].shape != outputs.shape:
                    self._sum_deferred()
            self._deferred.append((outputs, targets, loss))
        else:
            self._sum_deferred()
            sums = self.reduce(outputs, batch, loss)
            self._add("train", sums)
            self._started = True
            if counts is not None:
                counts.append(sums[-1])
        if self.meters is not None:
            self.meters.update("train", *self.scored(outputs.detach(), batch))

    def add_zeros(self, split: str) -> None:
        """Add nothing, on a rank without outputs (each stage of a pipeline but the last), so that it has sums too."""
        self._add(split, self._zeros())

    @property
    def _has_training_sums(self) -> bool:
        """Return whether there were batches of training since the last logged step."""
        return bool(self._deferred) or "train" in self._sums

    def _sum_deferred(self) -> None:
        """Add the deferred batches one after the other, which gives the same digits as without deferring."""
        if not self._deferred:
            return
        rows, ends = self.reduce_several(self._deferred), self._window_ends
        self._deferred, self._window_ends, begin = [], [], 0
        for end in ends:
            self._add_rows(rows[begin:end])
            self._windows.append(self._pop("train"))
            begin = end
        self._add_rows(rows[begin:])

    def _add_rows(self, rows: Any) -> None:
        if len(rows):
            total = self._sums.get("train")
            before = [] if total is None else [total.numpy()[None]]
            added = np.add.accumulate(np.concatenate((*before, rows)), axis=0, dtype=rows.dtype)
            self._sums["train"] = torch.from_numpy(added[-1].copy())

    def _add(self, split: str, sums: Tensor) -> None:
        total = self._sums.get(split)
        if total is None:
            require(
                isinstance(sums, Tensor) and sums.shape == (len(self.metrics) + 1,),
                f"{type(self).__name__}.reduce: return a tensor [len(metrics) + 1] = [{len(self.metrics) + 1}], the "
                f"sums of {', '.join(self.metrics)} over the batch and the number of samples.",
            )
        sums = sums.to(self._sums_dtype)
        self._sums[split] = sums if total is None else total + sums

    def _zeros(self) -> Tensor:
        return torch.zeros(len(self.metrics) + 1, dtype=self._sums_dtype, device=self.device)

    @property
    def _sums_dtype(self) -> torch.dtype:
        return torch.promote_types(self.dtype, torch.float32)  # type: ignore[arg-type]

    def _pop(self, split: str) -> Tensor:
        """Return the sums since the last call; those of training are added to the epoch's."""
        sums = self._sums.pop(split)
        if split == "train":
            epoch = self._epoch_sums.get(split)
            self._epoch_sums[split] = sums if epoch is None else epoch + sums
        return sums

    def _means(self, split: str, sums: Tensor) -> dict[str, float]:
        if self.trainer.world_size > 1:
            sums = self.trainer.strategy.reduce(sums.clone(), reduce_op="sum")
        *values, count = sums.tolist()
        if not count:
            return {}
        means = {name: value / count for name, value in zip(self.metrics, values, strict=True)}
        return {f"{split}/{name}": value for name, value in {**means, **self.compute(means)}.items()}

    # Reports of logged steps, of groups of steps (`lathe.trainer.multi_step`), and of epochs.

    def configure_callbacks(self) -> list[Any]:
        """Return none, and keep Lightning from advising `sync_dist` for metrics whose sums are of all ranks already."""
        names = "|".join(map(re.escape, self.metric_names))
        warnings.filterwarnings("ignore", message=rf".*recommended to use `self\.log\('({names})', .*sync_dist=True")
        return []

    def skippable_steps(self, trainer: Any) -> float:
        """Count the steps before the next logged one, which need no hook (`lathe.callbacks.SkippableHooks`)."""
        return steps_before(trainer, trainer.log_every_n_steps)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._log_step()

    def _log_step(self) -> None:
        """Log the mean since the last logged step, every `trainer.log_every_n_steps` optimizer steps."""
        trainer: Any = self.trainer
        step, interval = trainer.global_step, trainer.log_every_n_steps
        if step > 0 and reached(trainer, interval) and step != self._logged_step and self._has_training_sums:
            self._logged_step = step
            self._sum_deferred()
            self.latest = self._means("train", self._pop("train"))
            self.write(self.latest)

    def write(self, metrics: dict[str, float]) -> None:
        """Send metrics to all loggers at the current optimizer step."""
        trainer = self.trainer
        row, step = {**metrics, "epoch": trainer.current_epoch}, trainer.global_step
        for logger in trainer.loggers:
            logger.log_metrics(dict(row), step=step)

    def can_defer_log(self, trainer: Any) -> bool:
        """Return whether the row of a logged step may be written after steps that follow it."""
        return type(self).write is MetricSums.write and "write" not in vars(self)

    def deferred_row(self, trainer: Any) -> dict[str, Any]:
        """Return the row of a logged step, which `complete_deferred_rows` fills in."""
        self._logged_step = trainer.global_step
        if self._deferred:
            self._window_ends.append(len(self._deferred))
        else:
            self._windows.append(self._pop("train"))
        row: dict[str, Any] = {}
        self._deferred_rows.append((row, trainer.current_epoch))
        return row

    def complete_deferred_rows(self, trainer: Any) -> None:
        """Fill in the rows of logged steps, after a group of steps."""
        self._sum_deferred()
        for (row, epoch), sums in zip(self._deferred_rows, self._windows, strict=True):
            self.latest = self._means("train", sums)
            row.update(self.latest, epoch=epoch)
        self._deferred_rows, self._windows = [], []

    def on_train_epoch_end(self) -> None:
        if self._has_training_sums:
            self._sum_deferred()
            self._pop("train")
        if "train" in self._epoch_sums:
            means = self._means("train", self._epoch_sums.pop("train")) | self._take_meters("train")
            self.write({f"{name}_epoch": value for name, value in means.items()})
            self._log_exact(means, logger=False)

    def on_validation_epoch_end(self) -> None:
        self._report_split("val")

    def on_test_epoch_end(self) -> None:
        self._report_split("test")

    def _report_split(self, split: str) -> None:
        if split in self._sums:
            self._log_exact(self._means(split, self._sums.pop(split)) | self._take_meters(split))

    def _take_meters(self, split: str) -> dict[str, float]:
        values = {} if self.meters is None else self.meters.take(split, self.trainer)
        return {f"{split}/{name}": value for name, value in values.items()}

    def _log_exact(self, means: dict[str, float], logger: bool | None = None) -> None:
        """Log metrics for callbacks and the progress bar; with `logger=None` also for what `test` returns."""
        exact = {name: torch.tensor(value, dtype=torch.float64) for name, value in means.items()}
        self.log_dict(exact, logger=logger, prog_bar=not self.trainer.testing, rank_zero_only=False)

    # Checkpoints.

    def gather_sums(self) -> dict[str, list[list[float]]]:
        """Return every rank's sums of training in progress, by when they are reset; a collective.

        Their total on one rank would add up in another order, and differ in the last digit.
        """
        self._sum_deferred()
        gathered = {}
        for kind, sums in (("window", self._sums.get("train")), ("epoch", self._epoch_sums.get("train"))):
            if sums is not None or self.trainer.world_size > 1:
                rows = everyones_tensors(self._zeros() if sums is None else sums)
                gathered[kind] = [row.tolist() for row in rows]
        return gathered

    def restore_sums(self, gathered: dict[str, list[list[float]]]) -> None:
        """Load this rank's part of `gather_sums`; with another number of ranks, rank 0 gets the total."""
        zeros, world = self._zeros(), self.trainer.world_size
        for kind, values in gathered.items():
            rows = torch.tensor(values, dtype=zeros.dtype, device=zeros.device)
            if len(rows) != world:
                empty = torch.zeros_like(rows[:1]).expand(world - 1, -1)
                rows = torch.cat((rows.sum(0, keepdim=True), empty))
            sums = self._sums if kind == "window" else self._epoch_sums
            sums["train"] = rows[self.trainer.global_rank].clone()
