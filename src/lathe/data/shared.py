"""A torch DataLoader whose batches are shared out among ranks in the order of (seed, epoch), and whose dataset draws as
(seed, epoch, sample) say.
"""

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
    """The dataset of the user's DataLoader, whose draws follow from (seed, epoch, sample)."""
    collate: Any = loader.collate_fn
    drawn = not (collate is default_collate or draws_nothing(collate))
    return Seeded(loader.dataset, seed, collate_draws=drawn)


def reader_over(loader: DataLoader[Any], dataset: Dataset[Any], batches: Any) -> Reader:
    """The user's DataLoader over other lists of samples. Its own generator leaves the global one, and so the run,
    alone.
    """
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
    """Has `get_worker_info().dataset` be the user's dataset, without what is wrapped around it, and calls the user's
    `worker_init_fn`."""
    info: Any = get_worker_info()
    while isinstance(info.dataset, Seeded | Reads):
        object.__setattr__(info, "dataset", info.dataset.dataset)  # which is frozen
    if init is not None:
        init(number)


def read_over(loader: DataLoader[Any], dataset: Dataset[Any], batches: Iterable[Any]) -> "Reader | Here":
    """As `reader_over`; read in this process where the user's DataLoader has no workers, without what torch does for
    each batch beside reading it."""
    if loader.num_workers or loader.pin_memory:
        return reader_over(loader, dataset, batches)
    return Here(dataset, batches, loader.collate_fn)


def collates_apart(loader: DataLoader[Any]) -> bool:
    """Whether the user's `collate_fn` draws nothing from the generators of this process."""
    collate: Any = loader.collate_fn
    return loader.num_workers > 0 or collate is default_collate or draws_nothing(collate)


class Here:
    """Batches that are read in this process."""

    def __init__(self, dataset: Dataset[Any], batches: Iterable[Any], collate: Callable[[Any], Any]) -> None:
        self.dataset, self.batches, self.collate = dataset, batches, collate

    def __iter__(self) -> Iterator[Any]:
        for rows in self.batches:
            yield self.collate(fetch(self.dataset, rows))

    def close(self) -> None:
        """There is nothing to end."""


def parts_in_order(n: int, size: int, rank: int, replicas: int) -> list[list[int]]:
    """A rank's samples of an evaluation, in as many batches as every other rank has, none of them empty; together each
    of `n` samples once.

    Args:
        n: samples.
        size: of a batch, over all ranks together.
        rank: this one.
        replicas: how many there are.

    Raises:
        ValueError: a rank would have a batch without samples.
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
    """A rank's part of the batches of a user's DataLoader, in the order of (seed, epoch); see `EpochLoader`. An
    incomplete last batch is kept unless the user's loader drops it.

    Raises:
        UserError: a batch that does not divide by the ranks.
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
        """The rest, such as `dataset` and `batch_size`, as the user's DataLoader has it."""
        if name == "loader":  # in a copy, which has no attributes yet
            raise AttributeError(name)
        return getattr(self.loader, name)

    def _batches(self, epoch: int, first: int) -> Iterator[Any]:
        lists = self._parts(epoch)
        self._lists = [part if self._exact else Rows(part, epoch) for part in lists[first:]]
        yield from self._reader

    def numbers(self, batch: int) -> list[int]:
        """As `EpochLoader` has it."""
        return self._parts(self._epoch)[batch]

    def _parts(self, epoch: int) -> list[list[int]]:
        """This rank's samples of each batch."""
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
    """Batch sampler of one DataLoader for all epochs: its loader says which lists come next."""

    def __init__(self, loader: SharedLoader) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[list[Any]]:
        return iter(self.loader._lists)

    def __len__(self) -> int:
        return len(self.loader._lists)
