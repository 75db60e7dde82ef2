"""Documents whose tokens are identified by their values."""

from typing import Any

import numpy as np
import torch

from lathe.data.tokens import DocumentDataModule, DocumentLoader, Tokens, find_documents

END = 0


class Fixed:
    """Documents of these lengths (with the end token); the tokens of a split are 1, 2, 3, ..."""

    end = END

    def __init__(self, *lengths: int) -> None:
        self.lengths = lengths
        self.vocab_size = sum(lengths) + 1

    def prepare(self) -> None:
        pass

    def load(self) -> dict[str, Tokens]:
        ids = np.arange(1, sum(self.lengths) + 1, dtype=np.uint16)
        ids[np.cumsum(self.lengths, dtype=np.int64) - 1] = END
        return {name: Tokens(ids) for name in ("train", "val", "test")}


def lengths(n: int = 300, longest: int = 60, seed: int = 0) -> list[int]:
    return (np.random.default_rng(seed).integers(2, longest + 1, n)).tolist()


def module(*of: int, **settings: Any) -> DocumentDataModule:
    source = Fixed(*(of or lengths()))
    return DocumentDataModule(
        source, **({"vocab_size": source.vocab_size, "length": 64, "max_tokens": 400, "max_batch_size": 16} | settings)
    )


def loader(rank: int = 0, world: int = 1, train: bool = True, source: Any = None, **settings: Any) -> DocumentLoader:
    documents = find_documents((source or Fixed(*lengths())).load()["train"].ids, END)
    defaults = {"max_tokens": 400, "max_batch_size": 16, "train": train, "seed": 3}
    return DocumentLoader(documents, rank=rank, world_size=world, **(defaults | settings))


def join(parts: tuple[tuple[torch.Tensor, ...], ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the global batch of the ranks' shards, without padding rows."""
    world, rows = len(parts), len(parts[0][0])
    x, y = (torch.stack([part[i] for part in parts], dim=1).view(world * rows, -1) for i in (0, 1))
    counted = (y != -100).any(1)
    return x[counted], y[counted]


def same(left: list[Any], right: list[Any]) -> bool:
    pairs = [(a, b) for one, other in zip(left, right, strict=True) for a, b in zip(one, other, strict=True)]
    return all(torch.equal(a, b) for a, b in pairs)
