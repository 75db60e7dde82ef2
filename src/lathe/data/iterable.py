"""Iterable datasets, which one process reads in their own order."""

import copy
from collections.abc import Iterator
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.utils.data import IterableDataset

from lathe.data.items import Collate, Items, taken
from lathe.data.order import EpochLoader
from lathe.data.seeded import Rowed, drawn_in_turn
from lathe.errors import UserError


def is_iterable(dataset: Any) -> bool:
    """Return whether a dataset has its own order, as torch's and Hugging Face's iterable ones do."""
    return isinstance(dataset, IterableDataset) or (hasattr(dataset, "__iter__") and hasattr(dataset, "set_epoch"))


def batches(
    items: Items, collate: Collate, size: int, seed: int, epoch: int = 0, first: int = 0, whole: bool = False
) -> Iterator[Any]:
    """Yield the batches of an epoch from batch `first` on; `whole` leaves out an incomplete last batch."""
    numbered = enumerate(iter(items.dataset), start=first * size)
    samples = (items.made(sample, number) for number, sample in numbered)
    start = first * size
    while read := drawn_in_turn(samples, range(start, start + size), seed, epoch):
        if whole and len(read) < size:
            return
        yield taken(collate(Rowed(read, range(start, start + len(read)))))
        start += size


class EvalStream:
    """Evaluation batches of an iterable dataset, on one process."""

    def __init__(self, items: Items, collate: Collate, size: int, seed: int) -> None:
        self.items, self.collate, self.size, self.seed = items, collate, size, seed

    def __iter__(self) -> Iterator[Any]:
        return batches(self.items, self.collate, self.size, self.seed)


class TrainStream(EpochLoader):
    """Training batches of an iterable dataset, on one process; an epoch has `samples` samples.

    Each epoch restarts the dataset, after its `set_epoch(epoch)` if it has one. Resuming within an epoch needs a
    dataset with `state_dict` and `load_state_dict`.
    """

    def __init__(self, items: Items, collate: Collate, samples: int, **order: Any) -> None:
        super().__init__(samples, train=True, **{**order, "shuffle": False})
        self.items, self.collate = items, collate
        self._kept: Any = None
        dataset = items.dataset
        self._stateful = hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict")
        if not self._stateful:
            rank_zero_warn(
                f"{items.key}: {type(dataset).__name__} has no state_dict and load_state_dict, so a run that is "
                "continued in the middle of an epoch starts that epoch's data again: continue from the end of an epoch."
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the state of `EpochLoader`, and that of the dataset if it has one."""
        own = {"dataset": copy.deepcopy(self.items.dataset.state_dict())} if self._stateful and self._batch else {}
        return {**super().state_dict(), **own}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._kept = state_dict.get("dataset")

    def _batches(self, epoch: int, first: int) -> Iterator[Any]:
        dataset, kept, self._kept = self.items.dataset, self._kept, None
        if hasattr(dataset, "set_epoch"):
            dataset.set_epoch(epoch)
        if first and kept is not None:
            dataset.load_state_dict(kept)
        found = batches(self.items, self.collate, self.global_batch_size, self.seed, epoch, first, whole=True)
        for number in range(first, len(self)):
            batch = next(found, None)
            if batch is None:
                if first and kept is None:
                    return  # it restarted, and has less than is left
                raise UserError(
                    f"{self.items.key}: {type(dataset).__name__} ended within batch {number + 1} of an epoch, expected "
                    f"{self.n} samples: set data.samples to as many as it gives."
                )
            yield batch
