"""The three global generators of a process (`random`, `numpy.random`, `torch`): seeded, watched, and put back.

All of it is done for every batch, beside which the plain way to a state, `random.getstate()` above all, is not cheap.
"""

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
_WORDS = 624  # of 32 bits, and a place among them: the state of a Mersenne twister
_BYTES = 4 * (_WORDS + 1)


class Global(ABC):
    """A generator that everyone in the process draws from.

    Args:
        seed: starts it anew from 63 bits, of which it may take fewer; a function, as it is called for every sample.
    """

    def __init__(self, seed: Callable[[int], Any]) -> None:
        self.seed = seed

    @abstractmethod
    def take(self) -> Any:
        """What `moved` and `put_back` are told. Until `put_back` it may be drawn from and seeded."""

    @abstractmethod
    def moved(self, taken: Any) -> bool:
        """Whether anyone has drawn from it, or seeded it, since `take`."""

    @abstractmethod
    def put_back(self, taken: Any) -> None:
        """Leaves it as it was."""


class Python(Global):
    """That of `random`, whose state is read where it lies in memory, in a tenth of the time of
    `random.getstate()`: a place and the words, after what every object begins with. It is written by
    `random.setstate()` alone. Where they do not lie there, which is looked at first, it is read by `getstate()` too.
    """

    def __init__(self, in_memory: bool = True) -> None:
        super().__init__(random.seed)
        self._own: Any = random.seed.__self__  # type: ignore[attr-defined]  # the Random of which the module's functions are methods
        self._place = id(self._own) + object.__basicsize__
        self._in_memory = in_memory and self._own.getstate()[1] == self._words(self._raw())

    def take(self) -> Any:
        # the second one of a pair of normal draws is kept beside the words
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
        """As `getstate` has them: the place comes last."""
        found: list[int] = np.frombuffer(raw, np.uint32).tolist()
        return (*found[1:], *found[:1])


class NumPy(Global):
    """That of `numpy.random`. Another one stands in for it meanwhile, so that its state need not be read and written;
    but of a pair of its normal draws the second is forgotten.
    """

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
    """That of `torch` on the CPU, whose state has the second one of a pair of normal draws."""

    def __init__(self) -> None:
        super().__init__(torch.default_generator.manual_seed)

    def take(self) -> Tensor:
        return torch.default_generator.get_state()

    def moved(self, taken: Any) -> bool:
        return self._raw(self.take()) != self._raw(taken)

    def put_back(self, taken: Any) -> None:
        torch.default_generator.set_state(taken)

    def _raw(self, state: Tensor) -> bytes:
        # in less time than torch.equal takes
        return ctypes.string_at(state.data_ptr(), state.nbytes)


GENERATORS: tuple[Global, ...] = (Python(), NumPy(), Torch())


@contextmanager
def put_back() -> Iterator[list[Any]]:
    """Leaves this process's generators as they were (but that of a pair of NumPy's normal draws the second is
    forgotten). Gives what each of them is asked with whether it has moved.
    """
    taken = [generator.take() for generator in GENERATORS]
    try:
        yield taken
    finally:
        for generator, one in zip(GENERATORS, taken, strict=True):
            generator.put_back(one)


def seed_all(word: int) -> None:
    """Seeds all of them."""
    for generator in GENERATORS:
        generator.seed(word)


def seeding(generators: Iterable[Global], words: list[int]) -> Iterator[Any]:
    """Seeds these generators with the next of the words each time that it is asked to go on."""
    return zip(*(map(generator.seed, words) for generator in generators), strict=True)


def watched(call: Callable[[], T]) -> tuple[T, bool]:
    """What it returns, and whether it has drawn from a global generator of this process; they are left as they were."""
    with put_back() as taken:
        found = call()
        return found, any(generator.moved(one) for generator, one in zip(GENERATORS, taken, strict=True))
