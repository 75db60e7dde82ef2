"""The samples of each batch on each rank, and the resume position."""

from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch
from torch import Tensor

from lathe.data.prefetch import Side, one_ahead
from lathe.data.random import epoch_permutation
from lathe.data.selection import Selection
from lathe.errors import UserError, require

Batch = tuple[Tensor, Tensor]

IGNORE = -100  # torch's own ignore_index: the label of rows that only fill up a batch


class EpochLoader(ABC):
    """Iterates over epochs of batches that are sharded over ranks; subclasses fetch the samples.

    Training: global batch k of epoch e is places k*batch_size to (k+1)*batch_size of that epoch's permutation, and a
    rank takes its contiguous part; an incomplete last batch is dropped. Evaluation: samples in order, every batch of
    the same shape on every rank; padding rows repeat sample 0 with the label -100, so that each sample counts once.
    With `fills_up` False, for code that does not know this label, padding rows are left out, and a rank takes every
    world_size-th sample.

    The state, equal on all ranks, is `epoch` and `batch`, the number of its batches that were yielded. Each iteration
    starts the next epoch, except the first one, and the first one after `load_state_dict`, which continues at the
    state. An iterator has no effect before its first batch. A subclass sets `goes_ahead` if its batches draw from no
    shared generator, so that they can be prefetched.

    Args:
        n: samples.
        batch_size: over all ranks together.
        seed: of the order and the augmentation.
        rank: of this process.
        world_size: number of processes.
        train: see above.
        shuffle: False keeps the stored order in training too.
        limit: as in Lightning's `limit_train_batches`: batches, or share (a float), of an epoch; None for all.
        selection: the training samples of an epoch; None for all.
    """

    goes_ahead = False
    even = True  # equally many samples count on each rank

    def __init__(
        self,
        n: int,
        *,
        batch_size: int,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        train: bool = False,
        shuffle: bool = True,
        limit: int | float | None = None,
        selection: Selection | None = None,
    ) -> None:
        chosen = n if selection is None else selection.count(n, batch_size)
        if train and batch_size % world_size:
            raise UserError(
                f"data.batch_size={batch_size} is the global batch and does not divide by the {world_size} replicas "
                f"that trainer.devices={world_size} makes: choose a multiple of {world_size}, or other devices."
            )
        if train and not n:
            raise UserError(f"data.batch_size={batch_size} cannot be filled, as the training split has no samples.")
        if train and not 0 < batch_size <= chosen:
            if selection is not None:
                raise UserError(
                    f"data.batch_size={batch_size} cannot be filled from the {chosen} of {n} training samples that "
                    f"callbacks.hard_samples.share takes in an epoch: raise the share, or choose 1 to {chosen}."
                )
            raise UserError(
                f"data.batch_size={batch_size} cannot be filled from {n} training samples: choose 1 to {n}."
            )
        if not train and batch_size < world_size:
            raise UserError(
                f"data.eval_batch_size={batch_size} has fewer samples than the {world_size} replicas that"
                f" trainer.devices={world_size} makes: choose at least {world_size}."
            )
        self.n = n
        self.seed = seed
        self.selection = selection
        if selection is not None:
            selection.begin(n, batch_size)
        self.rank = rank
        self.world_size = world_size
        self.train = train
        self.shuffle = shuffle
        self.local_batch_size = batch_size // world_size
        self.global_batch_size = self.local_batch_size * world_size
        self._length = chosen // batch_size if train else -(-n // self.global_batch_size)
        allowed = int(self._length * limit) if isinstance(limit, float) else limit
        self.limit = self._length if allowed is None else min(allowed, self._length)
        self._epoch = 0
        self._batch = 0
        self.fills_up = True
        self.side: Side | None = None  # where batches are prefetched
        self._fresh = True  # continue at (epoch, batch) instead of starting the next epoch

    def __len__(self) -> int:
        return self._length

    def state_dict(self) -> dict[str, int]:
        """Return {"epoch", "batch"}: the epoch of the last yielded batch, and the number of its batches."""
        return {"epoch": self._epoch, "batch": self._batch}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Continue after the state's batch; after the epoch's last one (see `limit`), with the next epoch."""
        found = [state_dict.get(name) for name in ("epoch", "batch")]
        # -1: no epoch was begun
        fits = all(isinstance(value, int) and value >= least for value, least in zip(found, (-1, 0), strict=True))
        require(
            fits,
            f"The checkpoint's position in the data, epoch {found[0]!a} and batch {found[1]!a}, is none: go on from "
            "another checkpoint, or start a new run from its weights with ckpt_path.",
        )
        self._epoch, self._batch, self._fresh = state_dict["epoch"], state_dict["batch"], True

    def __iter__(self) -> Iterator[Batch]:
        # a generator: the code below does not run before the first next()
        if not self._fresh or self._batch >= self.limit:
            self._epoch, self._batch = self._epoch + 1, 0
        self._fresh = False
        epoch, first = self._epoch, self._batch
        batches = self._batches(epoch, first)
        if self.side is not None:
            batches = one_ahead(batches, self.side)
        for number, batch in enumerate(batches, start=first + 1):
            self._epoch, self._batch = epoch, number
            if self.train or self.fills_up:
                yield batch
            elif len((rows := counted(batch))[0]):
                yield rows

    @abstractmethod
    def _batches(self, epoch: int, first: int) -> Iterator[Batch]:
        """Yield this rank's batches of an epoch, from batch `first` on."""

    def epoch_order(self, epoch: int) -> Tensor:
        """Return the samples of a training epoch in order, all or those selected, int64."""
        if self.selection is not None:
            return self.selection.order(self.seed, epoch)
        return epoch_permutation(self.seed, epoch, self.n) if self.shuffle else torch.arange(self.n)

    def numbers(self, batch: int) -> list[int]:
        """Return this rank's samples of a batch in the current epoch."""
        rows, counts = self.rank_rows(self._epoch)
        listed: list[int] = rows[batch][counts[batch]].tolist()
        return listed

    def rows(self) -> Tensor:
        """Return this rank's samples in the current epoch, int64 [batches, local batch]."""
        return self.rank_rows(self._epoch)[0]

    def rank_rows(self, epoch: int, extra: int = 0) -> tuple[Tensor, Tensor]:
        """Return this rank's samples, int64 [batches, local batch + extra], and a mask of those that count.

        The `extra` columns continue cyclically into the next rank's part: a sample's right neighbour in the *global*
        batch is its mixing partner, whatever the number of ranks.
        """
        total = self._length * self.global_batch_size
        order = self.epoch_order(epoch)[:total] if self.train else torch.arange(total)
        start = self.rank * self.local_batch_size
        columns = torch.arange(start, start + self.local_batch_size + extra) % self.global_batch_size
        if not self.train and not self.fills_up:
            columns = torch.arange(self.rank, self.global_batch_size, self.world_size)
        rows = order.view(self._length, self.global_batch_size)[:, columns]
        counts = rows < self.n
        return rows.where(counts, 0), counts


def counted(batch: Batch) -> Batch:
    """Return a batch without its padding rows, whose targets are all -100."""
    x, y = batch
    rows = (y != IGNORE).flatten(1).any(1) if y.dim() > 1 else y != IGNORE
    return x[rows], y[rows]
