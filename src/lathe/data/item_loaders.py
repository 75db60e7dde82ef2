"""Loaders over the samples of a user's dataset."""

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader

from lathe.data.items import all_taken
from lathe.data.prefetch import Side, one_ahead
from lathe.data.seeded import Rows
from lathe.data.shared import SharedLoader, collates_apart, parts_in_order, read_over, seeded
from lathe.data.splits import Labels
from lathe.errors import UserError


class ItemLoader(SharedLoader):
    """`SharedLoader` over `Items`, with `labels` int64 [n] if known; raises errors of `Refused` batches."""

    def __init__(self, loader: DataLoader[Any], *, labels: Labels | None, **order: Any) -> None:
        super().__init__(loader, **order)
        self.labels = labels

    def _batches(self, epoch: int, first: int) -> Iterator[Any]:
        return all_taken(super()._batches(epoch, first))


class InOrder:
    """A rank's evaluation batches: every sample once, no padding; draws by `seed`, equal in all epochs."""

    def __init__(self, loader: DataLoader[Any], seed: int, rank: int, world_size: int) -> None:
        dataset: Any = loader.dataset
        try:
            rows = parts_in_order(len(dataset), loader.batch_size or 1, rank, world_size)
        except ValueError as error:
            raise UserError(f"data.eval_batch_size={loader.batch_size}: {error}, or trainer.devices=1.") from error
        self.rows, self.limit = rows, len(rows)
        self.goes_ahead = collates_apart(loader)
        self.side: Side | None = None  # where batches are prefetched
        lists: list[Any] = rows if dataset.draws_nothing else [Rows(part, 0) for part in rows]
        self._reader = read_over(loader, dataset if dataset.draws_nothing else seeded(loader, seed), lists)

    def __len__(self) -> int:
        return len(self.rows)

    def numbers(self, batch: int) -> list[int]:
        """Return this rank's samples of a batch."""
        return list(self.rows[batch])

    def __iter__(self) -> Iterator[Any]:
        batches = all_taken(iter(self._reader))
        return batches if self.side is None else one_ahead(batches, self.side)

    def close(self) -> None:
        self._reader.close()
