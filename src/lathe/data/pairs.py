"""Batches of pairs, a tensor and a class number, that are stacked while their samples are read."""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import default_collate, get_worker_info

# Bytes that are copied at a time: few, so that the samples are still in a core's cache, and their memory serves the
# next ones; many, so that the call costs little. And samples at first, before it is known how large they are.
PART_BYTES, FIRST = 2**18, 8
_DTYPE = attrgetter("dtype")


class Pairs:
    """The samples of a batch, of which nothing but their stack is kept as long as they are pairs of a tensor and a
    class number; where that gains nothing, they are stacked in the end.

    Args:
        rows: which of the dataset they are.
    """

    def __init__(self, rows: Sequence[int]) -> None:
        self.rows = rows
        self.part = FIRST  # samples that are best added at a time
        self._stack: Tensor | None = None  # [samples, ...]
        self._loose: list[Tensor] | None = None  # inputs that lie in the dataset's own memory, or in another order
        self._numbers: list[int] = []
        self._others: list[Any] | None = None  # all samples, once one has been of another form

    def add(self, samples: Sequence[Any]) -> None:
        """Takes the next samples."""
        if self._others is None:
            if self._taken(samples):
                return
            self._others = self.samples()
        self._others.extend(samples)

    def samples(self) -> list[Any]:
        """They all, as the dataset gave them; those that were stacked as views of their stack."""
        if self._others is not None:
            return self._others
        inputs = (() if self._stack is None else self._stack) if self._loose is None else self._loose
        return [*zip(inputs, self._numbers, strict=False)]

    def __getitem__(self, place: int) -> Any:
        return self.samples()[place]

    def batch(self) -> "Sent | None":
        """What torch's collate makes of them; None for samples that are not all such pairs, or make no batch."""
        if self._others is not None or len(self._numbers) != len(self.rows):
            return None
        if self._loose is None:
            return None if self._stack is None else Sent(self._stack, self._numbers)
        if len({*map(_DTYPE, self._loose)}) > 1:  # `Collate` looks at them
            return None
        try:
            here = get_worker_info() is None
            return Sent(torch.stack(self._loose) if here else default_collate(self._loose), self._numbers)
        except RuntimeError:  # of unlike shapes
            return None

    def _taken(self, samples: Sequence[Any]) -> bool:
        """Whether these fit the others, and are among them now."""
        # passes in C: this is done for every sample
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
            # of other lengths, sparse, on several devices, with a gradient, or more than a dataset's own __getitems__
            # was asked for
            return False
        self._numbers += numbers
        return True

    def _begin(self, first: Tensor) -> None:
        held = first.untyped_storage().nbytes() > first.nbytes  # by a larger tensor of the dataset: it isn't freed here
        if held or not first.is_contiguous():
            self._loose, self.part = [], len(self.rows)
        else:
            self._stack, self.part = _room(len(self.rows), first), max(1, PART_BYTES // max(1, first.nbytes))

    def _stacked(self, inputs: tuple[Tensor, ...]) -> bool:
        stack = self._stack
        assert stack is not None
        # stack itself sees that the others have the first one's shape, but not that they have its dtype
        if inputs[0].shape != stack.shape[1:] or {*map(_DTYPE, inputs)} != {stack.dtype}:
            return False
        torch.stack(inputs, out=stack.narrow(0, len(self._numbers), len(inputs)))
        return True


def _room(n: int, like: Tensor) -> Tensor:
    """An uninitialised batch of `n` such samples; in a worker in memory that is shared, as torch's own collate does it,
    which spares a copy."""
    if get_worker_info() is None:
        return like.new_empty((n, *like.shape))
    storage = like._typed_storage()._new_shared(n * like.numel(), device=like.device)
    return like.new(storage).resize_(n, *like.shape)


@dataclass(frozen=True)
class Sent:
    """A batch of pairs on its way out of a worker: class numbers go with the message, where a tensor of them would need
    shared memory of its own, which takes longer than reading some samples.
    """

    inputs: Tensor
    numbers: list[int]

    def pin_memory(self) -> list[Tensor]:
        """As torch's loader asks for it."""
        return [tensor.pin_memory() for tensor in self.whole()]

    def whole(self) -> list[Tensor]:
        """The batch."""
        return [self.inputs, torch.tensor(self.numbers)]
