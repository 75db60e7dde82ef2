"""Running sums of a task's metrics, on the device."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from lathe.tasks import written

MOST_WAITING = 16  # batches whose sums are made together


class Sums:
    """The part of a task that adds up its metrics: read once per logged step or epoch, for a read waits for the device.

    Sums of training are those since the last logged step, and those of the epoch before that.
    """

    metrics: tuple[str, ...]
    trainer: Any
    device: Any
    meters: Any

    def __init__(self) -> None:
        super().__init__()
        self._sums: dict[str, Tensor] = {}
        self._epoch_sums: dict[str, Tensor] = {}
        self._waiting: list[tuple[Any, Any, Tensor]] = []  # outputs, targets and loss of steps not in the sums

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
        float32 array [batches, len(metrics) + 1].
        """
        raise NotImplementedError

    def add_training(self, outputs: Any, batch: Any, loss: Tensor) -> None:
        """Adds the metrics of a batch that is trained on; `loss` without its graph."""
        kept = self.reduce_later(outputs, batch) if "train" in self._sums else None
        if kept is not None:
            self._wait(outputs.detach(), kept, loss)
        else:
            self._settle()
            self._add("train", self.reduce(outputs, batch, loss))
        if self.meters is not None:
            self.meters.update("train", *self.scored(outputs.detach(), batch))

    def _wait(self, outputs: Tensor, kept: Any, loss: Tensor) -> None:
        if self._waiting and (len(self._waiting) == MOST_WAITING or self._waiting[0][0].shape != outputs.shape):
            self._settle()
        self._waiting.append((outputs, kept, loss))

    def _settle(self) -> None:
        """Adds up what waits, one batch after the other: the same digits as if none had waited."""
        if self._waiting:
            rows = self.reduce_several(self._waiting)
            self._waiting = []
            total = self._sums["train"]
            added = np.add.accumulate(np.concatenate((total.numpy()[None], rows)), axis=0, dtype=np.float32)
            self._sums["train"] = torch.from_numpy(added[-1].copy())

    def _add(self, split: str, sums: Tensor) -> None:
        total = self._sums.get(split)
        if total is None:
            written.check_sums(self, sums)
        self._sums[split] = sums if total is None else total + sums

    def add_nothing(self, split: str) -> None:
        """What a rank that sees no outputs adds (all but the last stage of a pipeline), so that every rank has a sum to
        report.
        """
        self._add(split, self._nothing())

    def _nothing(self) -> Tensor:
        return torch.zeros(len(self.metrics) + 1, dtype=torch.float32, device=self.device)

    @property
    def _tables(self) -> dict[str, dict[str, Tensor]]:
        """The sums under way, by what they are reset after, and by split."""
        self._settle()
        return {"window": self._sums, "epoch": self._epoch_sums}

    def _take(self, split: str) -> Tensor:
        """The sums since the last call; those of training are also added to the epoch's."""
        self._settle()
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
