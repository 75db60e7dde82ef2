"""Cache of a teacher's logits."""

from collections.abc import Callable

import torch
from torch import Tensor


class LogitCache:
    """Logits by input, at most `limit` bytes of them; the oldest are dropped first.

    The key of a row is a 64-bit hash of its content, so that crops of a sample differ. Two inputs share a key with a
    probability of about 2^-64.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.rows: dict[int, Tensor] = {}
        self.lookups = self.hits = self.saved = 0  # rows requested, cached rows, and rows that were not computed
        self.told = False  # warned that the cache saves nothing
        self._factors: dict[tuple[int, torch.device], tuple[Tensor, Tensor]] = {}

    def keys(self, x: Tensor) -> list[int]:
        """Return a hash of each row of `x` [batch, ...]. Waits for the device."""
        flat = x.detach().contiguous().view(len(x), -1)
        words = flat.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()]).to(
            torch.int64
        )
        key = (words.shape[1], words.device)
        if key not in self._factors:
            generator = torch.Generator().manual_seed(0)
            drawn = torch.randint(-(2**63), 2**63 - 1, (2, words.shape[1]), generator=generator)
            self._factors[key] = (drawn[0].to(x.device), (drawn[1] | 1).to(x.device))
        offset, factor = self._factors[key]
        mixed = (words + offset) * factor
        mixed = (mixed ^ (mixed >> 29)) * -4658895280553007687  # a constant of splitmix64
        return (mixed ^ (mixed >> 32)).sum(1).tolist()

    def get(self, x: Tensor, compute: Callable[[Tensor], Tensor]) -> Tensor:
        """Return `compute(x)` [batch, ...], cached or computed; one new row computes the whole batch."""
        keys = self.keys(x)
        self.lookups += len(keys)
        known = sum(key in self.rows for key in keys)
        self.hits += known
        if known == len(keys):
            self.saved += known
            return torch.stack([self.rows[key] for key in keys])
        logits = compute(x)
        size = logits[0].numel() * logits.element_size()
        for key, row in zip(keys, logits.detach(), strict=True):
            self.rows.setdefault(key, row.clone())  # a view would keep the memory of the whole batch
        while len(self.rows) * size > self.limit:
            del self.rows[next(iter(self.rows))]
        return logits
