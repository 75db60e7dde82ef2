"""A torch DataLoader sharded over ranks, with order and draws by (seed, epoch, sample)."""

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, default_collate, get_worker_info

from lathe.data.order import EpochLoader
from lathe.data.seeded import Reads, Rows, Seeded, draws_nothing, fetch
from lathe.data.selection import Selection
from lathe.data.workers import Reader
from lathe.errors import UserError


def seeded(loader: DataLoader[Any], seed: int) -> Seeded:
    """Return the dataset of the user's DataLoader, with draws by (seed, epoch, sample)."""
    collate: Any = loader.collate_fn
    drawn = not (collate is default_collate or draws_nothing(collate))
    return Seeded(loader.dataset, seed, collate_draws=drawn)


def reader_over(loader: DataLoader[Any], dataset: Dataset[Any], batches: Any) -> Reader:
    """Return the user's DataLoader over other batches, with its own generator instead of the global one."""
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
        persistent_workers=loader.persistent_workers,
        in_order=loader.in_order,
        generator=torch.Generator(),
    )


def _begin_worker(init: Callable[[int], Any] | None, number: int) -> None:
    """Set the worker info's dataset to the user's, without wrappers, and call the user's `worker_init_fn`."""
    info: Any = get_worker_info()
    while isinstance(info.dataset, Seeded | Reads):
        object.__setattr__(info, "dataset", info.dataset.dataset)  # it is frozen
    if init is not None:
        init(number)


def read_over(loader: DataLoader[Any], dataset: Dataset[Any], batches: Iterable[Any]) -> "Reader | Here":
    """Return `reader_over`, or without workers a faster reader in this process."""
    if loader.num_workers or loader.pin_memory:
        return reader_over(loader, dataset, batches)
    return Here(dataset, batches, loader.collate_fn)


def collates_apart(loader: DataLoader[Any]) -> bool:
    """Return whether the user's `collate_fn` draws nothing from this process's generators."""
    collate: Any = loader.collate_fn
    return loader.num_workers > 0 or collate is default_collate or draws_nothing(collate)


class Here:
    """Reads batches in this process."""

    def __init__(self, dataset: Dataset[Any], batches: Iterable[Any], collate: Callable[[Any], Any]) -> None:
        self.dataset, self.batches, self.collate = dataset, batches, collate

    def __iter__(self) -> Iterator[Any]:
        for rows in self.batches:
            yield self.collate(fetch(self.dataset, rows))

    def close(self) -> None:
        """Do nothing."""


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

    An incomplete last batch is kept unless the user's loader drops it.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        *,
        shuffle: bool,
        seed: int,
        rank: int,
        world_size: int,
        limit: Any,
        selection: Selection | None = None,
    ) -> None:
        self.loader = loader
        dataset: Any = loader.dataset
        n = len(dataset)
        assert loader.batch_size is not None
        size = loader.batch_size if loader.drop_last else min(loader.batch_size, n)
        rest = 0 if loader.drop_last else n % size
        for what, count in (("batch_size", size), ("last batch", rest)):
            if count % world_size:
                way = "a multiple of it" if what == "batch_size" else "drop_last=True"
                raise UserError(
                    f"data: train_dataloader's {what} of {count} samples does not divide by the {world_size} replicas "
                    f"that share it: use {way}, or trainer.devices=1."
                )
        if n == 0 or size > n:
            raise UserError(f"data: train_dataloader has {n} samples, which fill no batch of {size}.")
        super().__init__(
            n,
            batch_size=size,
            seed=seed,
            rank=rank,
            world_size=world_size,
            train=True,
            shuffle=shuffle,
            limit=limit,
            selection=selection,
        )
        self.rest = rest // world_size
        self.even = False  # the user's collate_fn may drop samples, and labels of -100 do not count
        if rest:
            self._length += 1
            allowed = int(self._length * limit) if isinstance(limit, float) else limit
            self.limit = self._length if allowed is None else min(allowed, self._length)
        self._lists: list[list[Any]] = []
        self.goes_ahead = collates_apart(loader)
        self._exact = draws_nothing(dataset)
        self._reader = read_over(loader, dataset if self._exact else seeded(loader, seed), _Upcoming(self))

    def __getattr__(self, name: str) -> Any:
        """Return other attributes, such as `dataset` and `batch_size`, from the user's DataLoader."""
        if name == "loader":  # in a copy, which has no attributes yet
            raise AttributeError(name)
        return getattr(self.loader, name)

    def _batches(self, epoch: int, first: int) -> Iterator[Any]:
        lists = self._parts(epoch)
        self._lists = [part if self._exact else Rows(part, epoch) for part in lists[first:]]
        yield from self._reader

    def numbers(self, batch: int) -> list[int]:
        """Return this rank's samples of a batch in the current epoch."""
        return self._parts(self._epoch)[batch]

    def _parts(self, epoch: int) -> list[list[int]]:
        """Return this rank's samples of each batch."""
        order = self.epoch_order(epoch)
        whole = (self.n // self.global_batch_size) * self.global_batch_size
        mine = order[:whole].view(-1, self.global_batch_size)[:, self.rank * self.local_batch_size :][
            :, : self.local_batch_size
        ]
        lists: list[list[Any]] = mine.tolist()
        if self.rest:
            lists.append(order[whole + self.rank * self.rest :][: self.rest].tolist())
        return lists

    def close(self) -> None:
        self._reader.close()


class _Upcoming:
    """Batch sampler of one DataLoader for all epochs, whose lists the loader sets."""

    def __init__(self, loader: SharedLoader) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[list[Any]]:
        return iter(self.loader._lists)

    def __len__(self) -> int:
        return len(self.loader._lists)
