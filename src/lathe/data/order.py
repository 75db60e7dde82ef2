"""The samples of each batch on each rank, the resume position, the selection of an epoch's samples; DataLoaders."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lathe.data.random import epoch_permutation
from lathe.data.transfer import SideStream, one_ahead
from lathe.errors import WORKER, UserError, require, worker_message

Batch = tuple[Tensor, Tensor]

IGNORE = -100  # torch's own ignore_index: the label of rows that only fill up a batch


class Selection:
    """Epochs of a `share` of the samples, with the `hardest` part of it by loss, the rest drawn.

    Samples trained on fewer than `passes` times come first, so that losses are meaningful before they decide. A
    sample's loss is that of its last use. The order of an epoch is fixed when it begins, and is the same after a
    resume.

    Choosing by the latest known loss: Loshchilov and Hutter 2016, "Online Batch Selection for Faster Training of Neural
    Networks", arXiv:1511.06343, which ranks all samples and draws with probabilities that fall with the rank.
    """

    def __init__(self, share: float, hardest: float, passes: int) -> None:
        self.share, self.hardest, self.passes = share, hardest, passes
        self._restored: Mapping[str, Any] | None = None
        self.begin(0, 1)

    def count(self, n: int, batch_size: int) -> int:
        """Return how many of `n` samples an epoch takes: whole batches, or less than one."""
        share = max(1, round(n * self.share))
        return share - share % batch_size or share

    def begin(self, n: int, batch_size: int) -> None:
        """Start with a training set of `n` samples, or at a restored state; `batch_size` is global."""
        self._batch = batch_size
        self.losses = torch.full((n,), torch.inf)  # float32 [n]
        self.turns = torch.zeros(n, dtype=torch.int32)  # number of uses of each sample; int32 [n]
        self._epoch, self._order = -1, torch.empty(0, dtype=torch.int64)
        if self._restored is not None:
            self.restore(self._restored)

    def order(self, seed: int, epoch: int) -> Tensor:
        """Return the samples of an epoch in order, int64; past epochs are computed from the present losses."""
        if epoch == self._epoch:
            return self._order
        order = self._chosen(seed, epoch)
        if epoch > self._epoch:
            self._epoch, self._order = epoch, order
        return order

    def _chosen(self, seed: int, epoch: int) -> Tensor:
        n = len(self.losses)
        drawn, count = epoch_permutation(seed, epoch, n), self.count(n, self._batch)
        turns, losses = self.turns.cpu()[drawn].clamp(max=self.passes), self.losses.cpu()[drawn]
        due = turns < self.passes
        fewest = turns.argsort(stable=True)
        ranked = fewest[losses.where(~due, torch.inf)[fewest].argsort(descending=True, stable=True)]
        hard = ranked[: max(round(count * self.hardest), min(int(due.sum()), count))]
        is_left = torch.ones(n, dtype=torch.bool)
        is_left[hard] = False
        places = torch.cat((hard, is_left.nonzero().flatten()[: count - len(hard)]))
        return drawn[places.sort().values]  # the order is random, not by loss

    def note(self, samples: Tensor, losses: Tensor) -> None:
        """Record the losses [k] of these samples [k], on one device; NaN counts as hardest."""
        self.losses, self.turns = self.losses.to(losses.device), self.turns.to(losses.device)
        self.losses[samples] = losses.float().nan_to_num(nan=torch.inf)
        self.turns[samples] += 1

    def merge(self, others: list[tuple[Tensor, Tensor]]) -> None:
        """Merge other processes' losses and turns: for each sample, those of its last use."""
        for losses, turns in others:
            newer = turns.to(self.turns.device) > self.turns
            self.losses = losses.to(self.losses.device).where(newer, self.losses)
            self.turns = turns.to(self.turns.device).where(newer, self.turns)

    def state(self) -> dict[str, Any]:
        """Return the state for a resume."""
        losses, turns = self.losses.cpu().clone(), self.turns.cpu().clone()
        return {"losses": losses, "turns": turns, "epoch": self._epoch, "order": self._order}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a state, at once or in `begin`."""
        self._restored = state
        n, size = len(self.losses), len(state["losses"])
        if n:
            count = self.count(n, self._batch)
            require(
                size == n and (state["epoch"] < 0 or len(state["order"]) == count),
                f"callbacks.hard_samples: the checkpoint has {size} training samples and {len(state['order'])} in an "
                f"epoch, and there are {n} and {count} now: use the same data and share, or start a new run from its "
                "weights with ckpt_path.",
            )
            self.losses, self.turns = state["losses"].clone(), state["turns"].clone()
            self._epoch, self._order = state["epoch"], state["order"]


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
        count = n if selection is None else selection.count(n, batch_size)
        replicas = f"{world_size} replicas that trainer.devices makes"
        if train:
            part = "" if selection is None else f"the {count} (callbacks.hard_samples.share) of "
            require(
                batch_size % world_size == 0,
                f"data.batch_size={batch_size} is the global batch and does not divide by the {replicas}: choose a "
                f"multiple of {world_size}, or other devices.",
            )
            require(
                0 < batch_size <= count,
                f"data.batch_size={batch_size} cannot be filled from {part}{n} training samples: choose 1 to {count}.",
            )
        else:
            require(
                batch_size >= world_size,
                f"data.eval_batch_size={batch_size} has fewer samples than the {replicas}: choose at least "
                f"{world_size}.",
            )
        self.n, self.seed, self.selection = n, seed, selection
        if selection is not None:
            selection.begin(n, batch_size)
        self.rank, self.world_size = rank, world_size
        self.train, self.shuffle = train, shuffle
        self.local_batch_size = batch_size // world_size
        self.global_batch_size = self.local_batch_size * world_size
        self._length = count // batch_size if train else -(-n // self.global_batch_size)
        self.limit = self.limited(limit)
        self._epoch, self._batch = 0, 0
        self.fills_up = True
        self.side: SideStream | None = None  # where batches are prefetched
        self._fresh = True  # continue at (epoch, batch) instead of starting the next epoch

    def __len__(self) -> int:
        return self._length

    def limited(self, limit: int | float | None) -> int:
        """Return the batches of an epoch that are used; `limit` is as above."""
        allowed = int(self._length * limit) if isinstance(limit, float) else limit
        return self._length if allowed is None else min(allowed, self._length)

    def state_dict(self) -> dict[str, int]:
        """Return {"epoch", "batch"}: the epoch of the last yielded batch, and the number of its batches."""
        return {"epoch": self._epoch, "batch": self._batch}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Continue after the state's batch; after the epoch's last one (see `limit`), with the next epoch."""
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
            else:  # without the padding rows, whose targets are all IGNORE
                x, y = batch
                rows = (y != IGNORE).flatten(1).any(1) if y.dim() > 1 else y != IGNORE
                if rows.any():
                    yield x[rows], y[rows]

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
        return rows[batch][counts[batch]].tolist()

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


class Reader(DataLoader[Any]):
    """A DataLoader that ends its workers if one fails, and when it is closed.

    In torch they live until garbage collection, which has closed their queues by then, and so waits 5 seconds for each.
    A worker's UserError has its own message, without the worker's traceback.
    """

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        batches: Any = super().__iter__()
        try:
            yield from batches
        except Exception as error:
            self._iterator = batches
            self.close()
            message = worker_message(error) if self.num_workers else None
            if isinstance(error, UserError) and WORKER in str(error):
                message = str(error).rpartition("UserError: ")[2].strip()
            if message is not None:
                raise UserError(message) from error
            raise

    def close(self) -> None:
        """End persistent workers; the next iteration starts new ones."""
        batches: Any = self._iterator
        self._iterator = None
        if batches is not None and self.num_workers:
            batches._shutdown_workers()
