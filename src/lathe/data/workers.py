"""The processes that read data: `data.num_workers`, as many as it says, or as many as were measured to be quickest."""

import math
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Literal

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor
from torch.utils.data import DataLoader

from lathe.config.cpu_count import physical_cores
from lathe.errors import UserError, worker_message

SECONDS = 2.0  # after which no further number is tried, and what reading a whole run may take that needs no workers
WINDOW = 0.2  # seconds of reading by which a number is judged
PIECE = 0.02  # seconds that a read takes at least, in samples, unless a batch takes less
GAIN = 1.2  # times as fast as fewer workers: less is noise

# batches of these lists of samples, by so many workers
Read = Callable[[int, Iterable[list[int]]], Iterable[Any]]


@dataclass(frozen=True)
class Timed:
    """Seconds until a number of workers had started, and between two of the pieces that they read."""

    start: float
    each: float

    def of(self, pieces: float) -> float:
        """Seconds for each of so many pieces, the start included."""
        return self.each + self.start / pieces


class Workers:
    """How many processes read the data of a data module: `taken`, or None until it is measured.

    Args:
        asked: a number, or "auto".
    """

    def __init__(self, asked: int | Literal["auto"]) -> None:
        self.taken = asked if isinstance(asked, int) else None

    def measure(self, read: Read, order: Tensor, size: int, batches: float) -> int:
        """Takes what is quickest here for data that are read in this order, as `quickest` has it; says so in a line.

        Each process takes its own number, with its share of the machine's cores: the order of samples depends on none,
        so there is nothing to agree on, and nobody who waits for another.
        """
        most = max(1, physical_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        self.taken, why = quickest(read, order, size, batches, most)
        rank_zero_only(print)(f"data.num_workers=auto took {self.taken}: {why}.", flush=True)
        return self.taken


def batches_ahead(trainer: Any, batches: int, train: bool, persistent: bool) -> float:
    """How many batches are read after each start of the workers: those of an epoch, or of the run that is left where
    workers stay.

    Args:
        trainer: of the run.
        batches: of an epoch.
        train: whether there is more than one.
        persistent: whether workers stay between epochs.
    """
    if not (train and persistent):
        return batches
    epochs, steps = trainer.max_epochs, trainer.max_steps
    total = math.inf if epochs is None or epochs < 0 else batches * (epochs - trainer.current_epoch)
    return min(total, steps * trainer.accumulate_grad_batches) if steps > 0 else total


def quickest(read: Read, order: Tensor, size: int, batches: float, most: int) -> tuple[int, str]:
    """The smallest number of workers than which none is quicker beyond noise, and why it is taken, in words.

    Reads some of the samples and keeps none. What reads fast enough without workers for all that is to come, their
    start reckoned in, gets none. It takes about `SECONDS`, or as long as two samples take.

    Args:
        read: batches of lists of samples, by so many workers; 0 reads in this process.
        order: in which samples will be read, int64 [n]; each number of workers reads others, which are in no cache yet.
        size: samples of a batch.
        batches: how many are read after a start of the workers.
        most: workers that are tried.
    """
    began, upcoming = perf_counter(), _Upcoming(order)
    try:
        piece, seconds = _piece(read, upcoming, size)
    except Exception:  # of which a user's dataset can raise any; the run meets it at its batch
        return 0, "a sample that was read to measure it could not be, which is told at its batch"
    pieces = batches * size / piece
    if pieces * seconds <= SECONDS:
        return 0, f"reading the {batches:,.0f} batch{'es' * (batches != 1)} ahead takes {pieces * seconds:.2g} s"
    if piece == 1 and seconds > WINDOW:
        return most, f"a sample takes {seconds:.2g} s to read"
    found, taken, failed = {0: _timed(read, 0, upcoming.pieces(piece))}, 0, ""
    for workers in _ladder(most):
        if perf_counter() - began > SECONDS:
            break
        try:
            found[workers] = _timed(read, workers, upcoming.pieces(piece))
        except Exception as error:  # a worker that is killed, a dataset that can't be sent to one
            failed = f"; reading with {workers} failed ({type(error).__name__})"
            break
        if GAIN * found[workers].of(pieces) <= found[taken].of(pieces):
            taken = workers
        elif workers > 1:  # a single one reads no faster than this process, two may
            break
    rates = [f"{_shown(piece / (size * timed.each))} with {workers}" for workers, timed in found.items()]
    return taken, f"batches/s are {', '.join(rates)}{failed}"


class Reader(DataLoader[Any]):
    """A DataLoader whose workers end where one of them fails, and when it is closed.

    Those of torch then live until the garbage collector comes by, which has closed the queue through which they would
    be told to end, and so waits 5 seconds for each, wherever the program is by then.
    """

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        batches: Any = super().__iter__()
        try:
            yield from batches
        except Exception as error:
            self._iterator = batches
            self.close()
            gone = worker_message(error) if self.num_workers else None
            if gone is not None:
                raise UserError(gone) from error
            raise

    def close(self) -> None:
        """Ends workers that stay between iterations; the next one starts new ones."""
        batches: Any = self._iterator
        self._iterator = None
        if batches is not None and self.num_workers:
            batches._shutdown_workers()


class _Upcoming:
    """Samples in their order, from the first again after the last."""

    def __init__(self, order: Tensor) -> None:
        self.order, self._next = order, 0

    def take(self, count: int) -> list[int]:
        places = torch.arange(self._next, self._next + count) % len(self.order)
        self._next += count
        found: list[int] = self.order[places].tolist()
        return found

    def pieces(self, count: int) -> Iterator[list[int]]:
        while True:
            yield self.take(count)


def _piece(read: Read, upcoming: _Upcoming, size: int) -> tuple[int, float]:
    """How many samples make a piece of work that is long enough to be timed, a batch at most, and its seconds."""
    list(read(0, [upcoming.take(1)]))  # opens files and fills caches
    count = 1
    while True:
        began = perf_counter()
        list(read(0, [upcoming.take(count)]))
        seconds = perf_counter() - began
        if seconds >= PIECE or count == size:
            return count, seconds
        count = min(size, 2 * count)


def _timed(read: Read, workers: int, pieces: Iterator[list[int]]) -> Timed:
    """What reading costs, once what workers read ahead while they started is used up."""
    began = perf_counter()
    batches = iter(read(workers, pieces))
    next(batches)
    started = perf_counter()
    for _ in range(2 * workers):
        next(batches)
    mark, count = perf_counter(), 0
    # of the pieces that workers begin at the same time all are counted
    while perf_counter() - mark < WINDOW or count < workers:
        next(batches)
        count += 1
    each = (perf_counter() - mark) / count
    return Timed(max(0.0, started - began - each) if workers else 0.0, each)


def _ladder(most: int) -> list[int]:
    """The numbers that are tried: powers of two, and the largest."""
    return sorted({most, *(2**power for power in range(most.bit_length()))})


def _shown(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 10 else f"{rate:.2g}"
