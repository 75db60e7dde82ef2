"""A dataset's random draws (`random`, `numpy.random`, `torch`) as a function of (seed, epoch, sample)."""

import ctypes
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.random import mtrand
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset, get_worker_info

from lathe.data.random import hashed_seed, sample_seeds

T = TypeVar("T")
_BYTES = 4 * 625  # of a Mersenne twister: 624 words and a position


# Each generator has `seed(word)` with up to 63 bits, `take()`, which returns its state, `moved(taken)`, whether it was
# drawn from or seeded since, and `put_back(taken)`. Drawing and seeding are allowed from `take` until `put_back`.


class _Python:
    """Python's generator. Its words follow the object's header; `random.getstate` takes ten times as long."""

    seed = staticmethod(random.seed)

    def __init__(self) -> None:
        self._own: Any = random.seed.__self__  # type: ignore[attr-defined]  # the Random of the module's functions
        assert self._state(self.take()) == random.getstate(), "random's state has another place in this Python"

    def take(self) -> tuple[bytes, float | None]:
        return ctypes.string_at(id(self._own) + object.__basicsize__, _BYTES), self._own.gauss_next

    def moved(self, taken: tuple[bytes, float | None]) -> bool:
        return self.take() != taken

    def put_back(self, taken: tuple[bytes, float | None]) -> None:
        if self.moved(taken):
            random.setstate(self._state(taken))

    def _state(self, taken: tuple[bytes, float | None]) -> tuple[Any, ...]:
        position, *words = np.frombuffer(taken[0], np.uint32).tolist()
        return random.Random.VERSION, (*words, position), taken[1]


class _NumPy:
    """NumPy's generator, replaced until `put_back`: `get_state` takes 40 us. Half a pair of normal draws is lost."""

    def __init__(self) -> None:
        self._stand_in = np.random.MT19937(0)
        self._unmoved, self._state = self._raw(), self._stand_in.state

    def seed(self, word: int) -> None:
        np.random.seed(word % 2**32)

    def take(self) -> Any:
        taken = mtrand.get_bit_generator()
        mtrand.set_bit_generator(self._stand_in)
        if self.moved(taken):
            self._stand_in.state = self._state
        return taken

    def moved(self, taken: Any) -> bool:
        return self._raw() != self._unmoved

    def put_back(self, taken: Any) -> None:
        mtrand.set_bit_generator(taken)

    def _raw(self) -> bytes:
        return ctypes.string_at(self._stand_in.ctypes.state_address, _BYTES)


class _Torch:
    """The CPU generator of `torch`."""

    seed = staticmethod(torch.default_generator.manual_seed)

    def take(self) -> Tensor:
        return torch.default_generator.get_state()

    def moved(self, taken: Any) -> bool:
        return not torch.equal(self.take(), taken)

    def put_back(self, taken: Any) -> None:
        torch.default_generator.set_state(taken)


GENERATORS: tuple[Any, ...] = (_Python(), _NumPy(), _Torch())


@contextmanager
def put_back() -> Iterator[list[Any]]:
    """Restore the generators at the end; yield their states. Half a pair of NumPy's normal draws is lost."""
    taken = [generator.take() for generator in GENERATORS]
    try:
        yield taken
    finally:
        for generator, one in zip(GENERATORS, taken, strict=True):
            generator.put_back(one)


def seed_all(word: int) -> None:
    """Seed all global generators."""
    for generator in GENERATORS:
        generator.seed(word)


def watched(call: Callable[[], T]) -> tuple[T, bool]:
    """Return the result, and whether `call` drew from a global generator; the generators are restored."""
    with put_back() as taken:
        found = call()
        return found, any(generator.moved(one) for generator, one in zip(GENERATORS, taken, strict=True))


class Rows(list[int]):
    """Indices of the samples of a batch, and their epoch."""

    def __init__(self, rows: Iterable[int], epoch: int) -> None:
        super().__init__(rows)
        self.epoch = epoch


class Rowed(list[Any]):
    """The samples of a batch, and their indices in the dataset."""

    def __init__(self, samples: Iterable[Any], rows: Sequence[int]) -> None:
        super().__init__(samples)
        self.rows = rows


class Wrapper(Dataset[Any]):
    """A dataset over a user's `dataset`, which the user's `worker_init_fn` gets instead."""

    dataset: Any


def draws_nothing(part: Any) -> bool:
    """Return whether a dataset or collate function is known to draw nothing, such as a TensorDataset."""
    while isinstance(part, Subset):
        part = part.dataset
    return type(part) is TensorDataset or getattr(part, "draws_nothing", False) is True


class Seeded(Wrapper):
    """A dataset whose draws from the global generators follow from (seed, epoch, sample).

    The generators are restored after each batch. In a worker they are seeded by the batch, for a `collate_fn` that
    draws; `collate_draws` False saves that. Seeding can cost more than reading a sample, so only generators in use are
    seeded: a batch is read, and read again if it has drawn from another generator.
    """

    def __init__(self, dataset: Any, seed: int, collate_draws: bool = True) -> None:
        self.dataset, self.seed, self.collate_draws = dataset, seed, collate_draws
        self._drawn_from: set[int] = set()  # indices in GENERATORS

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, rows: Rows) -> Rowed:
        with put_back() as taken:
            while True:
                known = self._drawn_from
                samples = self._read(rows)
                moved = {at for at in range(len(GENERATORS)) if at not in known and GENERATORS[at].moved(taken[at])}
                if not moved:
                    break
                self._drawn_from = known | moved
        if self.collate_draws and rows and get_worker_info() is not None:
            seed_all(hashed_seed(self.seed, f"batch of {rows[0]}", rows.epoch))
        return Rowed(samples, rows)

    def _read(self, rows: Rows) -> Sequence[Any]:
        if not self._drawn_from:
            if getattr(self.dataset, "__getitems__", None):
                return self.dataset.__getitems__(rows)
            return [self.dataset[row] for row in rows]
        generators, samples = [GENERATORS[at] for at in sorted(self._drawn_from)], []
        for row, word in zip(rows, sample_seeds(self.seed, rows, rows.epoch), strict=True):
            for generator in generators:
                generator.seed(word)
            samples.append(self.dataset[row])
        return samples


def drawn_in_turn(samples: Iterator[Any], numbers: Iterable[int], seed: int, epoch: int) -> list[Any]:
    """Return the next samples, drawn by (seed, epoch, number) for each of `numbers`; fewer at the end."""
    found = []
    with put_back():
        for number in numbers:
            seed_all(hashed_seed(seed, f"sample {number}", epoch))
            try:
                found.append(next(samples))
            except StopIteration:
                break
    return found
