"""Batches of samples of different lengths, under a budget of padded tokens."""

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
    """Bucketed batches whose number and sizes are the same in every epoch.

    Samples are sorted by descending length and divided into buckets. The size of a batch follows from the longest
    sample of its bucket, not from the samples drawn, and an epoch only permutes samples within their buckets. So the
    length of an epoch is known before training, as learning-rate schedules need it.

    `order` int64 [samples]: samples by descending length. `bucket` int64 [samples]: the bucket of each place of
    `order`, ascending. `bounds` int64 [batches + 1]: batch k is places bounds[k] to bounds[k + 1], within one bucket.
    """

    order: Ints
    bucket: Ints
    bounds: Ints

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def draw(self, seed: int, epoch: int) -> Ints:
        """Return the sample at each place in an epoch, int64 [samples], by (seed, epoch) only."""
        generator = torch.Generator().manual_seed(hashed_seed(seed, "buckets", epoch))
        keys = torch.rand(len(self.order), generator=generator, dtype=torch.float64).numpy()
        return self.order[
            np.argsort(self.bucket + keys, kind="stable")
        ]  # stable: equal keys have the same order on every machine


def round_up(lengths: Lengths, multiple: int) -> Lengths:
    """Round each length up to a multiple of `multiple`."""
    return -(-lengths // multiple) * multiple


def plan_buckets(lengths: Ints, max_tokens: int, max_batch_size: int, growth: float, multiple: int = 1) -> BucketPlan:
    """Pack samples so that no batch, padded to its longest sample, exceeds `max_tokens` tokens.

    A bucket has lengths down to its longest divided by `growth`, and then shorter samples until its batches are full,
    so only the very last batch can be smaller.

    Args:
        lengths: of each sample, at least 1; int64 [samples].
        max_tokens: at least the longest sample, rounded up.
        max_batch_size: most samples of a batch.
        growth: at least 1; infinity for a single bucket.
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
