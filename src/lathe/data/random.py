"""Randomness that is a function of what it is for, not of who asks first.

Every table is drawn on the CPU by a generator that is seeded with a hash of (seed, purpose, epoch) and then indexed by
sample. A number therefore depends on (seed, epoch, sample) alone: not on rank, worker, device or the order of calls,
and no global generator moves.
"""

import hashlib
import math
from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor


def hashed_seed(seed: int, purpose: str, epoch: int = 0) -> int:
    """A 63-bit seed; any integer is a valid `seed`, 0 and negative ones included."""
    digest = hashlib.blake2b(f"{seed}/{purpose}/{epoch}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def sample_seeds(seed: int, rows: Iterable[int], epoch: int) -> list[int]:
    """`hashed_seed(seed, f"sample {row}", epoch)` of each of the rows, without a call for each."""
    hashed, end, start = hashlib.blake2b, f"/{epoch}", f"{seed}/sample "
    digests = [hashed(f"{start}{row}{end}".encode(), digest_size=8).digest() for row in rows]
    words: list[int] = (np.frombuffer(b"".join(digests), "<u8") >> np.uint64(1)).tolist()
    return words


def _generator(seed: int, purpose: str, epoch: int) -> torch.Generator:
    return torch.Generator().manual_seed(hashed_seed(seed, purpose, epoch))


def stream(seed: int, number: int) -> np.random.Generator:
    """Stream `number` of a source that is made from `seed` alone; any integer is a valid `seed`."""
    return np.random.Generator(np.random.Philox(key=[seed % 2**64, number]))


def epoch_permutation(seed: int, epoch: int, n: int) -> Tensor:
    """The order of epoch `epoch`: a permutation of 0..n-1, int64 [n]."""
    return torch.randperm(n, generator=_generator(seed, "order", epoch))


def sample_uniforms(seed: int, epoch: int, n: int, k: int) -> Tensor:
    """Row i holds the `k` numbers in [0, 1) that sample i uses in this epoch; float32 [n, k]."""
    return torch.rand((n, k), generator=_generator(seed, "uniforms", epoch))


def sample_betas(seed: int, epoch: int, n: int, alpha: float, purpose: str) -> Tensor:
    """Draws of Beta(alpha, alpha), one for each sample; float32 [n]. Tables of different `purpose` are independent."""
    draws = np.random.Generator(np.random.Philox(hashed_seed(seed, purpose, epoch))).beta(alpha, alpha, size=n)
    return torch.from_numpy(draws.astype(np.float32))


def to_integers(uniforms: Tensor, count: int) -> Tensor:
    """Maps numbers in [0, 1) to 0..count-1 with equal probability; int64 of the same shape."""
    # the largest float32 below 1 times `count` rounds up to `count` itself, hence the clamp
    return (uniforms * count).long().clamp_(max=count - 1)


class Rng:
    """Random numbers of the samples of a batch, each a function of (seed, epoch, sample, what it is for) alone.

    Counted, not drawn from a table: a number costs the same whether a batch is one sample of ten or of ten million. A
    call that follows another one gets other numbers.

    Args:
        seed: of the run.
        epoch: of the training.
        samples: which samples of the data set the batch has, int64 [n], on the device where numbers are wanted.
        purpose: what they are for; numbers of different purposes are independent.
        fill: the mean colour of the data set, uint8 [channels]; None for black.
    """

    def __init__(self, seed: int, epoch: int, samples: Tensor, purpose: str = "", fill: Tensor | None = None) -> None:
        self.seed, self.epoch, self.samples, self.fill = seed, epoch, samples, fill
        self._keys = _mixed(samples + _wrapped(hashed_seed(seed, f"transform/{purpose}", epoch)))
        self._used = 0

    def __len__(self) -> int:
        return len(self.samples)

    def bits(self, *shape: int) -> Tensor:
        """int64 [n, *shape], all 64 bits random: SplitMix64 (Steele et al. 2014), a sequence for each sample."""
        count = math.prod(shape)
        steps = torch.arange(self._used + 1, self._used + count + 1, device=self.samples.device)
        self._used += count
        return _mixed(self._keys[:, None] + steps * _GAMMA).view(-1, *shape)

    def uniform(self, *shape: int) -> Tensor:
        """float32 [n, *shape] in [0, 1)."""
        return (_shifted(self.bits(*shape), 40)).float() * 2.0**-24

    def integers(self, high: int, *shape: int) -> Tensor:
        """int64 [n, *shape], each of 0..high-1 with equal probability."""
        return to_integers(self.uniform(*shape), high)

    def normal(self, *shape: int) -> Tensor:
        """float32 [n, *shape] of mean 0 and standard deviation 1 (Box and Muller 1958)."""
        first, second = self.uniform(2, *shape).unbind(1)
        # in float64, so that what is left after rounding does not depend on where in the batch a sample stands
        first, second = first.double(), second.double()
        return ((-2 * torch.log1p(-first)).sqrt() * torch.cos(2 * math.pi * second)).float()


def _wrapped(number: int) -> int:
    """The same 64 bits as a signed integer."""
    return (number + 2**63) % 2**64 - 2**63


_GAMMA = _wrapped(0x9E3779B97F4A7C15)
_FACTORS = _wrapped(0xBF58476D1CE4E5B9), _wrapped(0x94D049BB133111EB)


def _shifted(bits: Tensor, count: int) -> Tensor:
    """int64 shifted right by `count`, zeros coming in."""
    return (bits >> count) & ((1 << (64 - count)) - 1)


def _mixed(bits: Tensor) -> Tensor:
    """SplitMix64's finalizer; integers, so equal on every device."""
    bits = (bits ^ _shifted(bits, 30)) * _FACTORS[0]
    bits = (bits ^ _shifted(bits, 27)) * _FACTORS[1]
    return bits ^ _shifted(bits, 31)
