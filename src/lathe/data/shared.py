"""Loaders over a user's dataset: order and draws by (seed, epoch, sample), sharded over ranks."""

import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.utils.data import DataLoader, IterableDataset, default_collate, get_worker_info

from lathe.data.order import EpochLoader
from lathe.data.prefetch import SideStream, one_ahead
from lathe.data.seeded import Rowed, Rows, Seeded, Wrapper, drawn_in_turn, draws_nothing
from lathe.data.splits import Labels
from lathe.data.workers import Reader, Upcoming
from lathe.errors import UserError


def is_iterable(dataset: Any) -> bool:
    """Return whether a dataset has its own order, as torch's and Hugging Face's iterable ones do."""
    return isinstance(dataset, IterableDataset) or (hasattr(dataset, "__iter__") and hasattr(dataset, "set_epoch"))


def reader_over(loader: DataLoader[Any], batches: Any, seed: int | None = None, stay: bool = True) -> Reader:
    """Return the user's DataLoader over other batches, with its own generator instead of the global one.

    With a `seed`, batches are `Rows`, and the dataset's draws follow from (seed, epoch, sample).
    """
    dataset: Any = loader.dataset
    if seed is not None and not draws_nothing(dataset):
        dataset = Seeded(dataset, seed, collate_draws=not _collate_draws_nothing(loader))
    return Reader(
        dataset,
        batch_sampler=batches,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        pin_memory_device=loader.pin_memory_device,
        timeout=loader.timeout,
        worker_init_fn=functools.partial(_begin_worker, loader.worker_init_fn),
        multiprocessing_context=loader.multiprocessing_context,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=stay and loader.persistent_workers,
        in_order=loader.in_order,
        generator=torch.Generator(),
    )


def _begin_worker(init: Callable[[int], Any] | None, number: int) -> None:
    """Set the worker info's dataset to the user's, without wrappers, and call the user's `worker_init_fn`."""
    info: Any = get_worker_info()
    while isinstance(info.dataset, Wrapper):
        object.__setattr__(info, "dataset", info.dataset.dataset)  # it is frozen
    if init is not None:
        init(number)


def _collate_draws_nothing(loader: DataLoader[Any]) -> bool:
    collate: Any = loader.collate_fn
    return collate is default_collate or draws_nothing(collate)


def parts_in_order(n: int, size: int, rank: int, replicas: int) -> list[list[int]]:
    """Return a rank's evaluation samples, in as many batches as on other ranks; each sample is used once.

    Raises:
        ValueError: a rank would have an empty batch.
    """
    most = -(-n // replicas)
    batches = -(-most // max(1, size // replicas))
    if n // replicas < batches:
        raise ValueError(
            f"{n} samples in batches of {size} leave a replica without any: use a batch_size of at least "
            f"{2 * replicas} and as many samples"
        )
    return [part.tolist() for part in torch.arange(rank, n, replicas).tensor_split(batches)]


class SharedLoader(EpochLoader):
    """A rank's part of a user's DataLoader, in the order of (seed, epoch); see `EpochLoader`.

    An incomplete last batch is kept unless the user's loader drops it. `labels` int64 [n] are the class numbers of the
    samples, if known.
    """

    even = False  # the user's collate_fn may drop samples, and labels of -100 do not count

    def __init__(
        self,
        loader: DataLoader[Any],
        *,
        world_size: int = 1,
        limit: Any = None,
        labels: Labels | None = None,
        **order: Any,
    ) -> None:
        self.loader, self.labels = loader, labels
        dataset: Any = loader.dataset
        n, size = len(dataset), loader.batch_size or 1
        size = size if loader.drop_last else min(size, n)
        rest = 0 if loader.drop_last else n % size
        super().__init__(n, batch_size=size, world_size=world_size, train=True, limit=limit, **order)
        if rest % world_size:
            raise UserError(
                f"data: train_dataloader's last batch of {rest} samples does not divide by the {world_size} replicas "
                "that share it: use drop_last=True, or trainer.devices=1."
            )
        self.rest = rest // world_size
        if rest:
            self._length += 1
            self.limit = self.limited(limit)
        self.goes_ahead = loader.num_workers > 0 or _collate_draws_nothing(loader)
        self._upcoming = Upcoming()
        self._reader = reader_over(loader, self._upcoming, self.seed)

    def __getattr__(self, name: str) -> Any:
        """Return other attributes, such as `dataset` and `batch_size`, from the user's DataLoader."""
        if name == "loader":  # in a copy, which has no attributes yet
            raise AttributeError(name)
        return getattr(self.loader, name)

    def _batches(self, epoch: int, first: int) -> Iterator[Any]:
        self._upcoming.lists = [Rows(part, epoch) for part in self._parts(epoch)[first:]]
        yield from self._reader

    def numbers(self, batch: int) -> list[int]:
        """Return this rank's samples of a batch in the current epoch."""
        return self._parts(self._epoch)[batch]

    def _parts(self, epoch: int) -> list[list[int]]:
        """Return this rank's samples of each batch."""
        order, start = self.epoch_order(epoch), self.rank * self.local_batch_size
        whole = self.n - self.n % self.global_batch_size
        mine = order[:whole].view(-1, self.global_batch_size)[:, start : start + self.local_batch_size]
        lists: list[list[int]] = mine.tolist()
        if self.rest:
            lists.append(order[whole + self.rank * self.rest :][: self.rest].tolist())
        return lists

    def close(self) -> None:
        self._reader.close()


class InOrder:
    """A rank's evaluation batches: every sample once, no padding; draws by `seed`, equal in all epochs."""

    def __init__(self, loader: DataLoader[Any], seed: int, rank: int, world_size: int) -> None:
        dataset: Any = loader.dataset
        try:
            self.rows = parts_in_order(len(dataset), loader.batch_size or 1, rank, world_size)
        except ValueError as error:
            raise UserError(f"data.eval_batch_size={loader.batch_size}: {error}, or trainer.devices=1.") from error
        self.limit = len(self.rows)
        self.goes_ahead = loader.num_workers > 0 or _collate_draws_nothing(loader)
        self.side: SideStream | None = None  # where batches are prefetched
        self._reader = reader_over(loader, [Rows(part, 0) for part in self.rows], seed)

    def __len__(self) -> int:
        return len(self.rows)

    def numbers(self, batch: int) -> list[int]:
        """Return this rank's samples of a batch."""
        return list(self.rows[batch])

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self._reader)
        return batches if self.side is None else one_ahead(batches, self.side)

    def close(self) -> None:
        self._reader.close()


class EvalStream:
    """Evaluation batches of an iterable dataset, on one process.

    `items` is an `Items` of `lathe.data.dataset`, and `collate` makes a batch of `Rowed` samples.
    """

    def __init__(self, items: Any, collate: Callable[[Rowed], Any], size: int, seed: int) -> None:
        self.items, self.collate, self.size, self.seed = items, collate, size, seed

    def __iter__(self) -> Iterator[Any]:
        return self.batches()

    def batches(self, epoch: int = 0, first: int = 0, whole: bool = False) -> Iterator[Any]:
        """Yield the batches of an epoch from batch `first` on; `whole` leaves out an incomplete last batch."""
        start = first * self.size
        samples = (self.items.made(sample, number) for number, sample in enumerate(self.items.dataset, start))
        while read := drawn_in_turn(samples, range(start, start + self.size), self.seed, epoch):
            if whole and len(read) < self.size:
                return
            yield self.collate(Rowed(read, range(start, start + len(read))))
            start += self.size


class TrainStream(EpochLoader):
    """Training batches of an iterable dataset, on one process; an epoch has `samples` samples.

    Each epoch restarts the dataset, after its `set_epoch(epoch)` if it has one. Resuming within an epoch needs a
    dataset with `state_dict` and `load_state_dict`.
    """

    def __init__(self, items: Any, collate: Callable[[Rowed], Any], samples: int, **order: Any) -> None:
        super().__init__(samples, train=True, **{**order, "shuffle": False})
        self._source, self._key, self._kept = items.dataset, items.key, None
        self._stream = EvalStream(items, collate, self.global_batch_size, self.seed)
        self._stateful = hasattr(self._source, "state_dict") and hasattr(self._source, "load_state_dict")
        if not self._stateful:
            rank_zero_warn(
                f"{items.key}: {type(self._source).__name__} has no state_dict and load_state_dict, so a run that is "
                "continued in the middle of an epoch starts that epoch's data again: continue from the end of an epoch."
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the state of `EpochLoader`, and that of the dataset if it has one."""
        own = {"dataset": copy.deepcopy(self._source.state_dict())} if self._stateful and self._batch else {}
        return {**super().state_dict(), **own}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._kept = state_dict.get("dataset")

    def _batches(self, epoch: int, first: int) -> Iterator[Any]:
        kept, self._kept = self._kept, None
        if hasattr(self._source, "set_epoch"):
            self._source.set_epoch(epoch)
        if first and kept is not None:
            self._source.load_state_dict(kept)
        found = self._stream.batches(epoch, first, whole=True)
        for number in range(first, len(self)):
            batch = next(found, None)
            if batch is None:
                if first and kept is None:
                    return  # it restarted, and has less than is left
                raise UserError(
                    f"{self._key}: {type(self._source).__name__} ended within batch {number + 1} of an epoch, expected "
                    f"{self.n} samples: set data.samples to as many as it gives."
                )
            yield batch
