"""A dataset's random draws (`random`, `numpy.random`, `torch`) as a function of (seed, epoch, sample)."""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.random import mtrand
from torch.utils.data import Dataset, Subset, TensorDataset, get_worker_info

from lathe.data.random import hashed_seed

T = TypeVar("T")
_TRIAL = 0  # the seed under which it is seen whether anything is drawn
_OWN = np.random.MT19937(_TRIAL)


class Rows(list[int]):
    """Samples of a batch, by number, and the epoch in which they are drawn."""

    def __init__(self, rows: Iterable[int], epoch: int) -> None:
        super().__init__(rows)
        self.epoch = epoch


class Rowed(list[Any]):
    """The samples of a batch, and which of the dataset they are."""

    def __init__(self, samples: Sequence[Any], rows: Sequence[int]) -> None:
        super().__init__(samples)
        self.rows = rows


def draws_nothing(dataset: Any) -> bool:
    """Whether a dataset is known to draw nothing: tensors, or some of their rows."""
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    return type(dataset) is TensorDataset or getattr(dataset, "draws_nothing", False) is True


def fetch(dataset: Any, rows: Sequence[int]) -> Sequence[Any]:
    """The samples, all at once from a dataset that can (`__getitems__`, as torch's own loader asks for them)."""
    if getattr(dataset, "__getitems__", None):
        found: Sequence[Any] = dataset.__getitems__(rows)
        return found
    return [dataset[row] for row in rows]


class Seeded(Dataset[Any]):
    """A dataset that is asked for the samples of an epoch, and whose draws from the global generators follow from
    (seed, epoch, sample). The generators are left as they were; in a worker, which has nothing else to draw, they
    follow from the batch, for a `collate_fn` that draws.

    Seeding for each sample costs more than many a sample, so only those generators are that are drawn from: a batch is
    first read without, and read again if another generator has moved than was known.
    """

    def __init__(self, dataset: Any, seed: int) -> None:
        self.dataset, self.seed = dataset, seed
        self._drawn_from: set[int] = set()  # places in _GENERATORS

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, rows: Rows) -> Rowed:
        with _kept():
            while True:
                _seed(_TRIAL)
                known = self._drawn_from
                samples = [self._drawn(rows.epoch, row) for row in rows] if known else fetch(self.dataset, rows)
                self._drawn_from = known | _moved()
                if self._drawn_from == known:
                    break
        if rows and get_worker_info() is not None:
            _seed(hashed_seed(self.seed, f"batch of {rows[0]}", rows.epoch))
        return Rowed(samples, rows)

    def _drawn(self, epoch: int, row: int) -> Any:
        word = hashed_seed(self.seed, f"sample {row}", epoch)
        for place in self._drawn_from:
            _GENERATORS[place](word)
        return self.dataset[row]


def drawn_in_turn(samples: Iterator[Any], numbers: Iterable[int], seed: int, epoch: int) -> list[Any]:
    """The next samples, one for each of their `numbers`, drawn as (seed, epoch, number) say; fewer at the end."""
    found = []
    with _kept():
        for number in numbers:
            _seed(hashed_seed(seed, f"sample {number}", epoch))
            try:
                found.append(next(samples))
            except StopIteration:
                break
    return found


def watched(call: Callable[[], T]) -> tuple[T, bool]:
    """What it returns, and whether it has drawn from a global generator of this process; they are left as they were."""
    with _kept():
        _seed(_TRIAL)
        return call(), bool(_moved())


@contextmanager
def _kept() -> Iterator[None]:
    """Leaves this process's generators as they were (but that of a pair of NumPy's normal draws the second is
    forgotten); a worker's own don't matter.
    """
    if get_worker_info() is not None:
        yield
        return
    before, numpys, torchs = random.getstate(), mtrand.get_bit_generator(), torch.get_rng_state()
    mtrand.set_bit_generator(_OWN)  # a twentieth of the time that its state would take
    try:
        yield
    finally:
        random.setstate(before)
        mtrand.set_bit_generator(numpys)
        torch.set_rng_state(torchs)


_GENERATORS: tuple[Callable[[int], Any], ...] = (
    random.seed,
    lambda word: np.random.seed(word % 2**32),
    torch.default_generator.manual_seed,
)


def _seed(word: int) -> None:
    for seed in _GENERATORS:
        seed(word)


def _probe() -> tuple[float, ...]:
    """The next number of each generator. NumPy's and torch's normal draws come in pairs, of which the second moves
    nothing: seeding forgets it, and the first has moved the generator."""
    return random.random(), float(np.random.random_sample()), float(torch.rand(()))  # noqa: S311 (no secret)


def _moved() -> set[int]:
    """Which generators have been drawn from since they were seeded for the trial; they are not as they were then."""
    return {place for place, (now, then) in enumerate(zip(_probe(), _UNMOVED, strict=True)) if now != then}


def _unmoved() -> tuple[float, ...]:
    with _kept():
        _seed(_TRIAL)
        return _probe()


_UNMOVED = _unmoved()
