"""Running sums of a task's metrics, on the device."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lathe.tasks import written

MOST_WAITING = 64  # batches whose sums are made together
MOST_NUMBERS = 2**18  # and numbers in their outputs


def stacked(loss: Tensor, others: Iterable[Tensor], count: Tensor | int) -> Tensor:
    """What `Task.reduce` returns: the summed loss, other sums and the count, in float32, or float64 for such a loss."""
    dtype = torch.promote_types(loss.dtype, torch.float32)
    number = count if isinstance(count, Tensor) else torch.full_like(loss, count, dtype=dtype)
    return torch.stack([value.to(dtype) for value in (loss.detach().to(dtype) * number, *others, number)])


class Sums:
    """The part of a task that adds up its metrics: read once per logged step or epoch, for a read waits for the device.

    Sums of training are those since the last logged step, and those of the epoch before that.
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
        self._waiting: list[tuple[Any, Any, Tensor]] = []  # outputs, targets and loss of steps not in the sums
        self._ends: list[int] = []  # of logged windows among those that wait
        self._ended: list[Tensor] = []  # sums of such windows
        self._begun = False  # whether sums of training have been looked at
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
        """What of this batch of training its sums are made of, where they may wait for those of the next ones, to be
        made together by `reduce_several`; None where they may not. A small net's step is as short as a dozen operations
        on a small batch are. Whole batches must not wait: their inputs would stay in memory.
        """
        return None

    def reduce_several(self, waiting: list[tuple[Any, Any, Tensor]]) -> Any:
        """What `reduce` makes of each (outputs, what `reduce_later` gave, loss), of equal shapes on the CPU, in one: a
        float array [batches, len(metrics) + 1].
        """
        raise NotImplementedError

    def add_training(self, outputs: Any, batch: Any, loss: Tensor) -> None:
        """Adds the metrics of a batch that is trained on; `loss` without its graph."""
        counts = self.step_counts
        kept = self.reduce_later(outputs, batch) if self._begun and counts is None else None
        if kept is not None:
            self._wait(outputs.detach(), kept, loss)
        else:
            self._settle()
            sums = self.reduce(outputs, batch, loss)
            self._add("train", sums)
            self._begun = True
            if counts is not None:
                counts.append(sums[-1])
        if self.meters is not None:
            self.meters.update("train", *self.scored(outputs.detach(), batch))

    @property
    def _adding(self) -> bool:
        """Whether there were batches of training since the last logged step."""
        return bool(self._waiting) or "train" in self._sums

    def _wait(self, outputs: Tensor, kept: Any, loss: Tensor) -> None:
        waiting = self._waiting
        if waiting:
            most = min(MOST_WAITING, MOST_NUMBERS // max(1, outputs.numel()))
            if len(waiting) >= most or waiting[0][0].shape != outputs.shape:
                self._settle()
        self._waiting.append((outputs, kept, loss))

    def _settle(self) -> None:
        """Adds up what waits, one batch after the other: the same digits as if none had waited."""
        if not self._waiting:
            return
        rows, ends = self.reduce_several(self._waiting), self._ends
        self._waiting, self._ends, begin = [], [], 0
        for end in ends:
            self._add_rows(rows[begin:end])
            self._ended.append(self._pop("train"))
            begin = end
        self._add_rows(rows[begin:])

    def _add_rows(self, rows: Any) -> None:
        if len(rows):
            total = self._sums.get("train")
            before = [] if total is None else [total.numpy()[None]]
            added = np.add.accumulate(np.concatenate((*before, rows)), axis=0, dtype=rows.dtype)
            self._sums["train"] = torch.from_numpy(added[-1].copy())

    def end_window(self) -> None:
        """The batches so far belong to a logged step whose sums `ended` gives."""
        if self._waiting:
            self._ends.append(len(self._waiting))
        else:
            self._ended.append(self._pop("train"))

    def ended(self) -> list[Tensor]:
        """The sums of the windows that have ended since the last call."""
        self._settle()
        found, self._ended = self._ended, []
        return found

    def _add(self, split: str, sums: Tensor) -> None:
        total = self._sums.get(split)
        if total is None:
            written.check_sums(self, sums)
        sums = sums.to(self._sums_dtype)
        self._sums[split] = sums if total is None else total + sums

    def add_nothing(self, split: str) -> None:
        """What a rank that sees no outputs adds (all but the last stage of a pipeline), so that every rank has a sum to
        report.
        """
        self._add(split, self._nothing())

    def _nothing(self) -> Tensor:
        return torch.zeros(len(self.metrics) + 1, dtype=self._sums_dtype, device=self.device)

    @property
    def _sums_dtype(self) -> torch.dtype:
        return torch.promote_types(self.dtype, torch.float32)

    @property
    def _tables(self) -> dict[str, dict[str, Tensor]]:
        """The sums under way, by what they are reset after, and by split."""
        self._settle()
        return {"window": self._sums, "epoch": self._epoch_sums}

    def _take(self, split: str) -> Tensor:
        """The sums since the last call; those of training are also added to the epoch's."""
        self._settle()
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
