"""Save, seed and restore the global generators (`random`, `numpy.random`, `torch`), for every batch."""

import ctypes
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.random import mtrand
from torch import Tensor

T = TypeVar("T")
_WORDS = 624  # of 32 bits, and a position: the state of a Mersenne twister
_BYTES = 4 * (_WORDS + 1)


class Global(ABC):
    """A global random generator of the process; the function `seed` uses up to 63 bits."""

    def __init__(self, seed: Callable[[int], Any]) -> None:
        self.seed = seed

    @abstractmethod
    def take(self) -> Any:
        """Return the state for `moved` and `put_back`; drawing and seeding are allowed until `put_back`."""

    @abstractmethod
    def moved(self, taken: Any) -> bool:
        """Return whether it was drawn from or seeded since `take`."""

    @abstractmethod
    def put_back(self, taken: Any) -> None:
        """Restore its state."""


class Python(Global):
    """The generator of `random`, read in memory in a tenth of the time of `random.getstate()`.

    Position and words follow the object header; if they differ from `getstate()` at the start, that is used.
    """

    def __init__(self, in_memory: bool = True) -> None:
        super().__init__(random.seed)
        self._own: Any = random.seed.__self__  # type: ignore[attr-defined]  # the Random instance of the module's functions
        self._place = id(self._own) + object.__basicsize__
        self._in_memory = in_memory and self._own.getstate()[1] == self._words(self._raw())

    def take(self) -> Any:
        # the second normal draw of a pair is stored apart
        return (self._raw(), self._own.gauss_next) if self._in_memory else random.getstate()

    def moved(self, taken: Any) -> bool:
        return bool(self.take() != taken)

    def put_back(self, taken: Any) -> None:
        if self.moved(taken):
            random.setstate((random.Random.VERSION, self._words(taken[0]), taken[1]) if self._in_memory else taken)

    def _raw(self) -> bytes:
        room = type(self._own).__basicsize__ - object.__basicsize__
        return ctypes.string_at(self._place, _BYTES) if room >= _BYTES else b""

    def _words(self, raw: bytes) -> tuple[int, ...]:
        """Return the words as `getstate` does, with the position last."""
        found: list[int] = np.frombuffer(raw, np.uint32).tolist()
        return (*found[1:], *found[:1])


class NumPy(Global):
    """The generator of `numpy.random`, replaced until `put_back`; half a pair of normal draws is lost."""

    def __init__(self) -> None:
        super().__init__(lambda word: np.random.seed(word % 2**32))
        self._stand_in = np.random.MT19937(0)
        self._place = self._stand_in.ctypes.state_address
        self._unmoved, self._state = self._raw(), self._stand_in.state

    def take(self) -> Any:
        taken = mtrand.get_bit_generator()
        mtrand.set_bit_generator(self._stand_in)
        if self._raw() != self._unmoved:
            self._stand_in.state = self._state
        return taken

    def moved(self, taken: Any) -> bool:
        return self._raw() != self._unmoved

    def put_back(self, taken: Any) -> None:
        mtrand.set_bit_generator(taken)

    def _raw(self) -> bytes:
        return ctypes.string_at(self._place, _BYTES)


class Torch(Global):
    """The CPU generator of `torch`; its state includes the second normal draw of a pair."""

    def __init__(self) -> None:
        super().__init__(torch.default_generator.manual_seed)

    def take(self) -> Tensor:
        return torch.default_generator.get_state()

    def moved(self, taken: Any) -> bool:
        return self._raw(self.take()) != self._raw(taken)

    def put_back(self, taken: Any) -> None:
        torch.default_generator.set_state(taken)

    def _raw(self, state: Tensor) -> bytes:
        # faster than torch.equal
        return ctypes.string_at(state.data_ptr(), state.nbytes)


GENERATORS: tuple[Global, ...] = (Python(), NumPy(), Torch())


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


def seeding(generators: Iterable[Global], words: list[int]) -> Iterator[Any]:
    """Return an iterator that seeds these generators with the next of the words at each step."""
    return zip(*(map(generator.seed, words) for generator in generators), strict=True)


def watched(call: Callable[[], T]) -> tuple[T, bool]:
    """Return the result, and whether `call` drew from a global generator; the generators are restored."""
    with put_back() as taken:
        found = call()
        return found, any(generator.moved(one) for generator, one in zip(GENERATORS, taken, strict=True))
