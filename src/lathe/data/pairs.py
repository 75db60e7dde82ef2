"""Batches of pairs, a tensor and a class number, that are stacked while their samples are read."""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import default_collate, get_worker_info

# Bytes that are copied at a time: few enough for samples to stay in a core's cache, and many enough to make calls
# cheap. FIRST is the number of samples before their size is known.
PART_BYTES, FIRST = 2**18, 8
_DTYPE = attrgetter("dtype")


class Pairs:
    """The samples `rows` of a dataset, stacked as they arrive if they are (tensor, class number) pairs.

    If early stacking gains nothing, they are stacked at the end.
    """

    def __init__(self, rows: Sequence[int]) -> None:
        self.rows = rows
        self.part = FIRST  # how many samples to add at a time
        self._stack: Tensor | None = None  # [samples, ...]
        self._loose: list[Tensor] | None = None  # inputs in the dataset's own memory, or not contiguous
        self._numbers: list[int] = []
        self._others: list[Any] | None = None  # all samples, after one of another form

    def add(self, samples: Sequence[Any]) -> None:
        """Add the next samples."""
        if self._others is None:
            if self._taken(samples):
                return
            self._others = self.samples()
        self._others.extend(samples)

    def samples(self) -> list[Any]:
        """Return all samples as the dataset gave them; stacked ones are views of the stack."""
        if self._others is not None:
            return self._others
        inputs = (() if self._stack is None else self._stack) if self._loose is None else self._loose
        return [*zip(inputs, self._numbers, strict=False)]

    def __getitem__(self, place: int) -> Any:
        return self.samples()[place]

    def batch(self) -> "Sent | None":
        """Return the same batch as torch's collate; None for samples that are not pairs, or don't stack."""
        if self._others is not None or len(self._numbers) != len(self.rows):
            return None
        if self._loose is None:
            return None if self._stack is None else Sent(self._stack, self._numbers)
        if len({*map(_DTYPE, self._loose)}) > 1:  # `Collate` checks these
            return None
        try:
            here = get_worker_info() is None
            return Sent(torch.stack(self._loose) if here else default_collate(self._loose), self._numbers)
        except RuntimeError:  # different shapes
            return None

    def _taken(self, samples: Sequence[Any]) -> bool:
        """Add the samples, and return whether they fit the others."""
        # passes in C, as this runs for every sample
        if {*map(type, samples)} != {tuple}:
            return False
        try:
            inputs, numbers = zip(*samples, strict=True)
            if {*map(type, numbers)} != {int} or {*map(type, inputs)} != {Tensor}:
                return False
            if not self._numbers:
                self._begin(inputs[0])
            if self._loose is not None:
                self._loose += inputs
            elif not self._stacked(inputs):
                return False
        except (RuntimeError, ValueError):
            # other lengths, sparse, several devices, a gradient, or more samples from __getitems__ than requested
            return False
        self._numbers += numbers
        return True

    def _begin(self, first: Tensor) -> None:
        held = first.untyped_storage().nbytes() > first.nbytes  # a view of a larger tensor, whose memory stays in use
        if held or not first.is_contiguous():
            self._loose, self.part = [], len(self.rows)
        else:
            self._stack, self.part = _room(len(self.rows), first), max(1, PART_BYTES // max(1, first.nbytes))

    def _stacked(self, inputs: tuple[Tensor, ...]) -> bool:
        stack = self._stack
        assert stack is not None
        # stack checks the shape of the others, but not their dtype
        if inputs[0].shape != stack.shape[1:] or {*map(_DTYPE, inputs)} != {stack.dtype}:
            return False
        torch.stack(inputs, out=stack.narrow(0, len(self._numbers), len(inputs)))
        return True


def _room(n: int, like: Tensor) -> Tensor:
    """Allocate a batch of `n` samples; in a worker in shared memory, as torch's collate does."""
    if get_worker_info() is None:
        return like.new_empty((n, *like.shape))
    storage = like._typed_storage()._new_shared(n * like.numel(), device=like.device)
    return like.new(storage).resize_(n, *like.shape)


@dataclass(frozen=True)
class Sent:
    """A batch of pairs from a worker; a list of class numbers is faster to send than a tensor."""

    inputs: Tensor
    numbers: list[int]

    def pin_memory(self) -> list[Tensor]:
        """Pin the batch; torch's loader calls this."""
        return [tensor.pin_memory() for tensor in self.whole()]

    def whole(self) -> list[Tensor]:
        """Return the batch."""
        return [self.inputs, torch.tensor(self.numbers)]
