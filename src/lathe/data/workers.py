"""DataLoader workers: a reader that ends them, and their number for `data.num_workers=auto`."""

import itertools
import math
import os
from collections.abc import Callable, Iterable, Iterator
from time import perf_counter
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor
from torch.utils.data import DataLoader

from lathe.config.cpu_count import physical_cores
from lathe.errors import WORKER, UserError, worker_message

SECONDS = 2.0  # reading that takes less in all needs no workers
WINDOW = 0.2  # seconds of reading that are timed
GAIN = 1.2  # least speedup by workers that is not noise

# batches of these lists of samples, by so many workers
Read = Callable[[int, Iterable[list[int]]], Iterable[Any]]


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


class Upcoming:
    """Batch sampler of one DataLoader for all epochs, whose lists its owner sets."""

    def __init__(self) -> None:
        self.lists: list[Any] = []

    def __iter__(self) -> Iterator[Any]:
        return iter(self.lists)

    def __len__(self) -> int:
        return len(self.lists)


def batches_ahead(trainer: Any, batches: int, train: bool, persistent: bool) -> float:
    """Return the batches per worker start: of an epoch, or if `persistent` of the rest of the run."""
    if not (train and persistent):
        return batches
    epochs, steps = trainer.max_epochs, trainer.max_steps
    total = math.inf if epochs is None or epochs < 0 else batches * (epochs - trainer.current_epoch)
    return min(total, steps * trainer.accumulate_grad_batches) if steps > 0 else total


def measure_workers(read: Read, order: Tensor, size: int, batches: float) -> int:
    """Choose and report the number of workers; see `choose_workers`. Ranks need not agree."""
    cores = max(1, physical_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    taken, why = choose_workers(read, order, size, batches, cores)
    rank_zero_only(print)(f"data.num_workers=auto took {taken}: {why}.", flush=True)
    return taken


def choose_workers(read: Read, order: Tensor, size: int, batches: float, cores: int) -> tuple[int, str]:
    """Return 0 or `cores`, whichever reads faster, and the reason.

    Args:
        read: batches of lists of samples, by so many workers; 0 reads in this process.
        order: of the samples, int64 [n].
        size: samples of a batch.
        batches: number of batches after a start of the workers.
        cores: workers to try.
    """

    def seconds(workers: int, count: int, skipped: int) -> float:
        """Return the seconds per sample in lists of `count`, after the first lists."""
        places = torch.arange(count)
        lists = (order[(places + start) % len(order)].tolist() for start in itertools.count(0, count))
        left = iter(read(workers, lists))
        list(itertools.islice(left, skipped))
        began, done = perf_counter(), 0
        while perf_counter() - began < WINDOW or done < skipped:
            next(left)
            done += 1
        return (perf_counter() - began) / (done * count)

    try:
        began = perf_counter()
        list(read(0, [order[:1].tolist()]))
        count = size if (perf_counter() - began) * size < SECONDS else 1
        alone = seconds(0, count, 1)
        if alone * size * batches <= SECONDS:
            return 0, f"reading the {batches:,.0f} batches ahead takes {alone * size * batches:.2g} s"
        together = seconds(cores, count, 3 * cores)  # the first lists are read during the start
    except Exception as error:  # of the user's dataset, which raises it again in the run, or of a killed worker
        return 0, f"reading to measure it failed ({type(error).__name__})"
    rates = f"{1 / (size * alone):,.3g} with 0, {1 / (size * together):,.3g} with {cores}"
    return cores if GAIN * together <= alone else 0, f"batches/s are {rates}"
