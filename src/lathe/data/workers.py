"""The number of data workers: `data.num_workers`, given or measured."""

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

SECONDS = 2.0  # after which no further number is tried; reading that takes less in all needs no workers
WINDOW = 0.2  # seconds of reading that are timed for each number
PIECE = 0.02  # a timed read has enough samples to take this many seconds, at most a batch
GAIN = 1.2  # least speedup over fewer workers that is not noise

# batches of these lists of samples, by so many workers
Read = Callable[[int, Iterable[list[int]]], Iterable[Any]]


@dataclass(frozen=True)
class Timed:
    """Seconds until workers have started, and per piece that they read."""

    start: float
    each: float

    def of(self, pieces: float) -> float:
        """Return the seconds per piece for so many pieces, the start included."""
        return self.each + self.start / pieces


class Workers:
    """`taken` workers of a data module that `asked` for a number or "auto"; None until measured."""

    def __init__(self, asked: int | Literal["auto"]) -> None:
        self.taken = asked if isinstance(asked, int) else None

    def measure(self, read: Read, order: Tensor, size: int, batches: float) -> int:
        """Choose and report the fastest number of workers; see `quickest`.

        Ranks need not agree: the order of samples does not depend on the number.
        """
        most = max(1, physical_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        self.taken, why = quickest(read, order, size, batches, most)
        rank_zero_only(print)(f"data.num_workers=auto took {self.taken}: {why}.", flush=True)
        return self.taken


def batches_ahead(trainer: Any, batches: int, train: bool, persistent: bool) -> float:
    """Return the batches per worker start: of an epoch, or if `persistent` of the rest of the run."""
    if not (train and persistent):
        return batches
    epochs, steps = trainer.max_epochs, trainer.max_steps
    total = math.inf if epochs is None or epochs < 0 else batches * (epochs - trainer.current_epoch)
    return min(total, steps * trainer.accumulate_grad_batches) if steps > 0 else total


def quickest(read: Read, order: Tensor, size: int, batches: float, most: int) -> tuple[int, str]:
    """Return the smallest number of workers that no other beats beyond noise, and the reason in words.

    Reads some samples, in about `SECONDS`, or as long as two samples take. Returns 0 if reading without workers is fast
    enough for the `batches` after a start of the workers.

    Args:
        read: batches of lists of samples, by so many workers; 0 reads in this process.
        order: of the samples, int64 [n]; each number of workers reads others, which are not cached.
        size: samples of a batch.
        batches: number of batches after a start of the workers.
        most: highest number to try.
    """
    began, upcoming = perf_counter(), _Upcoming(order)
    try:
        piece, seconds = _piece(read, upcoming, size)
    except Exception:  # a user's dataset can raise anything, and raises it again in the run
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
        except Exception as error:  # a killed worker, or a dataset that can't be pickled
            failed = f"; reading with {workers} failed ({type(error).__name__})"
            break
        if GAIN * found[workers].of(pieces) <= found[taken].of(pieces):
            taken = workers
        elif workers > 1:  # one worker may not be faster than this process, but two may be
            break
    rates = [f"{_shown(piece / (size * timed.each))} with {workers}" for workers, timed in found.items()]
    return taken, f"batches/s are {', '.join(rates)}{failed}"


class Reader(DataLoader[Any]):
    """A DataLoader that ends its workers if one fails, and when it is closed.

    In torch they live until garbage collection, which has closed their queues by then, and so waits 5 seconds for each.
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
        """End persistent workers; the next iteration starts new ones."""
        batches: Any = self._iterator
        self._iterator = None
        if batches is not None and self.num_workers:
            batches._shutdown_workers()


class _Upcoming:
    """Samples in order, repeated cyclically."""

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
    """Return the number of samples that take long enough to be timed, at most a batch, and their seconds."""
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
    """Time reading, after the pieces that workers read ahead during their start are used up."""
    began = perf_counter()
    batches = iter(read(workers, pieces))
    next(batches)
    started = perf_counter()
    for _ in range(2 * workers):
        next(batches)
    mark, count = perf_counter(), 0
    # count all pieces that workers begin at the same time
    while perf_counter() - mark < WINDOW or count < workers:
        next(batches)
        count += 1
    each = (perf_counter() - mark) / count
    return Timed(max(0.0, started - began - each) if workers else 0.0, each)


def _ladder(most: int) -> list[int]:
    """Return the numbers to try: powers of two, and the largest."""
    return sorted({most, *(2**power for power in range(most.bit_length()))})


def _shown(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 10 else f"{rate:.2g}"
