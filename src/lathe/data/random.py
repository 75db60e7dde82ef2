"""Randomness that is a function of what it is for, not of who asks first.

Every table is drawn on the CPU by a generator that is seeded with a hash of (seed, purpose, epoch) and then indexed by
sample. A number therefore depends on (seed, epoch, sample) alone: not on rank, worker, device or the order of calls,
and no global generator moves.
"""

import hashlib

import numpy as np
import torch
from torch import Tensor


def hashed_seed(seed: int, purpose: str, epoch: int = 0) -> int:
    """A 63-bit seed; any integer is a valid `seed`, 0 and negative ones included."""
    digest = hashlib.blake2b(f"{seed}/{purpose}/{epoch}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


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
