"""Random numbers that depend only on (seed, epoch, sample): Lathe's own, and those that a user's dataset draws.

Tables are drawn on the CPU by a generator seeded with a hash of (seed, purpose, epoch), and then indexed by sample. So
numbers do not depend on rank, worker, device or the order of calls, and no global generator is used. A user's dataset
draws from the global generators (`random`, `numpy.random`, `torch`), which are seeded for each sample.
"""

import hashlib
import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset, get_worker_info


def hashed_seed(seed: int, purpose: str, epoch: int = 0) -> int:
    """Return a 63-bit seed; `seed` may be any integer."""
    digest = hashlib.blake2b(f"{seed}/{purpose}/{epoch}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def sample_seeds(seed: int, rows: Iterable[int], epoch: int) -> list[int]:
    """Return `hashed_seed(seed, f"sample {row}", epoch)` for each row, in one pass."""
    hashed, end, start = hashlib.blake2b, f"/{epoch}", f"{seed}/sample "
    digests = [hashed(f"{start}{row}{end}".encode(), digest_size=8).digest() for row in rows]
    seeds: list[int] = (np.frombuffer(b"".join(digests), "<u8") >> np.uint64(1)).tolist()
    return seeds


def _generator(seed: int, purpose: str, epoch: int) -> torch.Generator:
    return torch.Generator().manual_seed(hashed_seed(seed, purpose, epoch))


def stream(seed: int, number: int) -> np.random.Generator:
    """Return generator `number` of a source made from `seed`, which may be any integer."""
    return np.random.Generator(np.random.Philox(key=[seed % 2**64, number]))


def epoch_permutation(seed: int, epoch: int, n: int) -> Tensor:
    """Return the order of an epoch: a permutation of 0..n-1, int64 [n]."""
    return torch.randperm(n, generator=_generator(seed, "order", epoch))


def sample_uniforms(seed: int, epoch: int, n: int, k: int) -> Tensor:
    """Return `k` numbers in [0, 1) for each sample in this epoch; float32 [n, k]."""
    return torch.rand((n, k), generator=_generator(seed, "uniforms", epoch))


def sample_betas(seed: int, epoch: int, n: int, alpha: float, purpose: str) -> Tensor:
    """Draw Beta(alpha, alpha) for each sample, float32 [n], independently for each `purpose`."""
    draws = np.random.Generator(np.random.Philox(hashed_seed(seed, purpose, epoch))).beta(alpha, alpha, size=n)
    return torch.from_numpy(draws.astype(np.float32))


def to_integers(uniforms: Tensor, count: int) -> Tensor:
    """Map numbers in [0, 1) to 0..count-1 with equal probability; int64 of the same shape."""
    # the largest float32 below 1 times `count` rounds up to `count`
    return (uniforms * count).long().clamp_(max=count - 1)


class Rng:
    """Random numbers for the samples of a batch, by (seed, epoch, sample, purpose) only.

    They are computed from a counter, not drawn from a table, so the cost does not depend on the size of the data set.
    Consecutive calls return different numbers. `samples` int64 [n] are on the device of the numbers; `fill` uint8
    [channels] is the mean colour of the data set, None for black.
    """

    def __init__(self, seed: int, epoch: int, samples: Tensor, purpose: str = "", fill: Tensor | None = None) -> None:
        self.seed, self.epoch, self.samples, self.fill = seed, epoch, samples, fill
        self._keys = _mixed(samples + _wrapped(hashed_seed(seed, f"transform/{purpose}", epoch)))
        self._used = 0

    def __len__(self) -> int:
        return len(self.samples)

    def bits(self, *shape: int) -> Tensor:
        """Return int64 [n, *shape] of 64 random bits: SplitMix64 (Steele et al. 2014), a sequence per sample."""
        count = math.prod(shape)
        steps = torch.arange(self._used + 1, self._used + count + 1, device=self.samples.device)
        self._used += count
        return _mixed(self._keys[:, None] + steps * _GAMMA).view(-1, *shape)

    def uniform(self, *shape: int) -> Tensor:
        """Return float32 [n, *shape] in [0, 1)."""
        return (_shifted(self.bits(*shape), 40)).float() * 2.0**-24

    def integers(self, high: int, *shape: int) -> Tensor:
        """Return int64 [n, *shape], each of 0..high-1 with equal probability."""
        return to_integers(self.uniform(*shape), high)

    def normal(self, *shape: int) -> Tensor:
        """Return float32 [n, *shape], standard normal (Box and Muller 1958)."""
        first, second = self.uniform(2, *shape).unbind(1)
        # in float64, so that the rounded result does not depend on a sample's place in the batch
        first, second = first.double(), second.double()
        return ((-2 * torch.log1p(-first)).sqrt() * torch.cos(2 * math.pi * second)).float()


def _wrapped(number: int) -> int:
    """Return the same 64 bits as a signed integer."""
    return (number + 2**63) % 2**64 - 2**63


_GAMMA = _wrapped(0x9E3779B97F4A7C15)
_FACTORS = _wrapped(0xBF58476D1CE4E5B9), _wrapped(0x94D049BB133111EB)


def _shifted(bits: Tensor, count: int) -> Tensor:
    """Shift int64 right by `count`, filling with zeros."""
    return (bits >> count) & ((1 << (64 - count)) - 1)


def _mixed(bits: Tensor) -> Tensor:
    """Apply SplitMix64's finalizer; integers, so equal on every device."""
    bits = (bits ^ _shifted(bits, 30)) * _FACTORS[0]
    bits = (bits ^ _shifted(bits, 27)) * _FACTORS[1]
    return bits ^ _shifted(bits, 31)


T = TypeVar("T")


class Generator(NamedTuple):
    """A global generator: `seed(word)` with up to 63 bits, `state()`, which compares by value, and `restore(state)`."""

    seed: Callable[[int], Any]
    state: Callable[[], Any]
    restore: Callable[[Any], Any]


def _numpy_state() -> tuple[Any, ...]:
    kind, key, *rest = np.random.get_state()
    return kind, np.asarray(key).tobytes(), *rest


def _restore_numpy(state: tuple[Any, ...]) -> None:
    np.random.set_state((state[0], np.frombuffer(state[1], np.uint32), *state[2:]))


GENERATORS = (
    Generator(random.seed, random.getstate, random.setstate),
    Generator(lambda word: np.random.seed(word % 2**32), _numpy_state, _restore_numpy),
    Generator(
        torch.default_generator.manual_seed,
        lambda: torch.get_rng_state().numpy().tobytes(),
        lambda state: torch.set_rng_state(torch.frombuffer(bytearray(state), dtype=torch.uint8)),
    ),
)


@contextmanager
def put_back() -> Iterator[list[Any]]:
    """Restore the generators at the end; yield their states."""
    states = [generator.state() for generator in GENERATORS]
    try:
        yield states
    finally:
        for generator, state in zip(GENERATORS, states, strict=True):
            generator.restore(state)


def seed_all(word: int) -> None:
    """Seed all global generators."""
    for generator in GENERATORS:
        generator.seed(word)


def watched(call: Callable[[], T]) -> tuple[T, bool]:
    """Return the result, and whether `call` drew from a global generator; the generators are restored."""
    with put_back() as states:
        result = call()
        return result, [generator.state() for generator in GENERATORS] != states


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
        with put_back() as states:
            while True:
                used = self._drawn_from
                samples = self._read(rows)
                drawn = {i for i in range(3) if i not in used and GENERATORS[i].state() != states[i]}
                if not drawn:
                    break
                self._drawn_from = used | drawn
        if self.collate_draws and rows and get_worker_info() is not None:
            seed_all(hashed_seed(self.seed, f"batch of {rows[0]}", rows.epoch))
        return Rowed(samples, rows)

    def _read(self, rows: Rows) -> Sequence[Any]:
        if not self._drawn_from:
            if getattr(self.dataset, "__getitems__", None):
                return self.dataset.__getitems__(rows)
            return [self.dataset[row] for row in rows]
        generators, samples = [GENERATORS[index] for index in sorted(self._drawn_from)], []
        for row, word in zip(rows, sample_seeds(self.seed, rows, rows.epoch), strict=True):
            for generator in generators:
                generator.seed(word)
            samples.append(self.dataset[row])
        return samples
