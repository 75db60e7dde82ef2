"""Sum a task's metrics on the device."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lathe.errors import require

SPLITS = ("train", "val", "test")
MAX_DEFERRED = 64  # batches whose sums are computed together
MAX_NUMBERS = 2**18  # in their outputs


def stacked(loss: Tensor, others: Iterable[Tensor], count: Tensor | int) -> Tensor:
    """Return what `Task.reduce` returns: the summed loss, other sums and the count, in float32 (float64 for such a
    loss).
    """
    dtype = torch.promote_types(loss.dtype, torch.float32)
    number = count if isinstance(count, Tensor) else torch.full_like(loss, count, dtype=dtype)
    return torch.stack([value.to(dtype) for value in (loss.detach().to(dtype) * number, *others, number)])


class MetricSums:
    """Running sums of a task's metrics. They are read once per logged step or epoch, as a read waits for the device.

    Training has two: the sums since the last logged step, and those of the epoch before that.
    """

    metrics: tuple[str, ...]
    trainer: Any
    device: Any
    dtype: Any
    meters: Any

    def __init__(self) -> None:
        super().__init__()
        self._sums: dict[str, Tensor] = {}
        self._epoch_sums: dict[str, Tensor] = {}
        self._deferred: list[tuple[Any, Any, Tensor]] = []  # outputs, targets and loss of steps not yet in the sums
        self._window_ends: list[int] = []  # places in `_deferred` where a logged window ends
        self._windows: list[Tensor] = []  # sums of ended windows
        self._started = False  # a batch of training was summed directly, which checks `reduce`
        self.step_counts: list[Tensor] | None = None  # counted samples, where batches are weighted by them

    def reduce(self, outputs: Any, batch: Any, loss: Tensor) -> Tensor:
        """See `Task`."""
        raise NotImplementedError

    def scored(self, outputs: Any, batch: Any) -> tuple[Tensor, Tensor]:
        """See `Task`."""
        raise NotImplementedError

    def compute(self, means: dict[str, float]) -> dict[str, float]:
        """See `Task`."""
        return {}

    def reduce_later(self, outputs: Any, batch: Any) -> Any:
        """Return what `reduce_several` needs of a training batch, such as its targets; None to sum it now.

        The sums of a small batch cost as much as a small net's step. Do not return inputs: they would stay in memory.
        """
        return None

    def reduce_several(self, deferred: list[tuple[Any, Any, Tensor]]) -> Any:
        """Return the sums of several batches, as a float array [batches, len(metrics) + 1].

        Args:
            deferred: (outputs, return value of `reduce_later`, loss) of each, of equal shapes on the CPU.
        """
        raise NotImplementedError

    def add_training(self, outputs: Any, batch: Any, loss: Tensor) -> None:
        """Add the metrics of a training batch; `loss` is detached."""
        counts = self.step_counts
        kept = self.reduce_later(outputs, batch) if self._started and counts is None else None
        if kept is not None:
            self._defer(outputs.detach(), kept, loss)
        else:
            self._sum_deferred()
            sums = self.reduce(outputs, batch, loss)
            self._add("train", sums)
            self._started = True
            if counts is not None:
                counts.append(sums[-1])
        if self.meters is not None:
            self.meters.update("train", *self.scored(outputs.detach(), batch))

    @property
    def _has_training_sums(self) -> bool:
        """Return whether there were batches of training since the last logged step."""
        return bool(self._deferred) or "train" in self._sums

    def _defer(self, outputs: Tensor, kept: Any, loss: Tensor) -> None:
        if self._deferred:
            limit = min(MAX_DEFERRED, MAX_NUMBERS // max(1, outputs.numel()))
            if len(self._deferred) >= limit or self._deferred[0][0].shape != outputs.shape:
                self._sum_deferred()
        self._deferred.append((outputs, kept, loss))

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

    def end_window(self) -> None:
        """End the window of a logged step, whose sums `take_windows` returns."""
        if self._deferred:
            self._window_ends.append(len(self._deferred))
        else:
            self._windows.append(self._pop("train"))

    def take_windows(self) -> list[Tensor]:
        """Return the sums of the windows that ended since the last call."""
        self._sum_deferred()
        windows, self._windows = self._windows, []
        return windows

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

    def add_zeros(self, split: str) -> None:
        """Add nothing, on a rank without outputs (each stage of a pipeline but the last), so that it has sums too."""
        self._add(split, self._zeros())

    def _zeros(self) -> Tensor:
        return torch.zeros(len(self.metrics) + 1, dtype=self._sums_dtype, device=self.device)

    @property
    def _sums_dtype(self) -> torch.dtype:
        return torch.promote_types(self.dtype, torch.float32)

    def _training_sums(self) -> dict[str, Tensor]:
        """Return the sums of training in progress: "window" and "epoch", by when they are reset."""
        self._sum_deferred()
        sums = {"window": self._sums.get("train"), "epoch": self._epoch_sums.get("train")}
        return {kind: value for kind, value in sums.items() if value is not None}

    def _take(self, split: str) -> Tensor:
        """Return the sums since the last call; those of training are added to the epoch's."""
        self._sum_deferred()
        return self._pop(split)

    def _pop(self, split: str) -> Tensor:
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
