"""Batches of samples that differ in length, under a budget of padded tokens."""

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from lathe.data.random import hashed_seed

Ints = NDArray[np.int64]
Lengths = TypeVar("Lengths", Ints, np.int64)


@dataclass(frozen=True)
class BucketPlan:
    """Which places belong to one batch; the samples that stand there are drawn anew for each epoch.

    Samples are sorted by length, the longest first, and cut into buckets. The number of samples of a batch follows from
    the longest sample of its bucket, not from those that happen to be drawn, so the number of batches and their sizes
    are the same in every epoch: an epoch only permutes samples within their buckets. The length of an epoch is
    therefore known before training, as learning-rate schedules need it.

    `order` int64 [samples]: samples by falling length. `bucket` int64 [samples]: the bucket of each place of `order`,
    rising. `bounds` int64 [batches + 1]: batch k is places bounds[k] to bounds[k + 1]; none reaches over two buckets.
    """

    order: Ints
    bucket: Ints
    bounds: Ints

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def draw(self, seed: int, epoch: int) -> Ints:
        """Which sample stands at each place in an epoch: int64 [samples]; a function of (seed, epoch) alone."""
        generator = torch.Generator().manual_seed(hashed_seed(seed, "buckets", epoch))
        keys = torch.rand(len(self.order), generator=generator, dtype=torch.float64).numpy()
        return self.order[
            np.argsort(self.bucket + keys, kind="stable")
        ]  # stable: equal keys are in one order on every machine


def round_up(lengths: Lengths, multiple: int) -> Lengths:
    """Each length raised to a multiple of `multiple`."""
    return -(-lengths // multiple) * multiple


def plan_buckets(lengths: Ints, max_tokens: int, max_batch_size: int, growth: float, multiple: int = 1) -> BucketPlan:
    """Packs samples so that no batch, padded to its longest sample, holds more than `max_tokens` tokens.

    A bucket holds lengths down to its longest one divided by `growth`, and then the next shorter samples until its
    batches are full, so only the last batch of all can have fewer samples than fit.

    Args:
        lengths: of each sample, at least 1; int64 [samples].
        max_tokens: at least the longest sample, rounded up.
        max_batch_size: samples of a batch at most.
        growth: at least 1; infinity makes one bucket of all samples.
        multiple: padded lengths are rounded up to a multiple of this.
    """
    order = np.argsort(-lengths, kind="stable")
    falling = lengths[order]
    rising = -falling
    bucket, bounds, start = np.empty(len(order), dtype=np.int64), [0], 0
    number = 0
    while start < len(order):
        longest = int(falling[start])
        size = min(max_batch_size, max_tokens // int(round_up(falling[start], multiple)))
        stop = int(np.searchsorted(rising, -longest / growth, side="right"))
        stop = min(len(order), start + -(-(stop - start) // size) * size)
        bucket[start:stop] = number
        bounds += [*range(start + size, stop, size), stop]
        start, number = stop, number + 1
    return BucketPlan(order, bucket, np.array(bounds))
