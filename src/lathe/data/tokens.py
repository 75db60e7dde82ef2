"""Windows of tokens for language modelling: their loader, and the data module over a source of tokens."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field

from lathe.config.types import Count, Seed
from lathe.config.validation import validated
from lathe.data.base import ExactDataModule
from lathe.data.checks import check_members, using
from lathe.data.order import IGNORE, Batch, EpochLoader
from lathe.data.random import hashed_seed
from lathe.errors import UserError

Ids = NDArray[np.uint8] | NDArray[np.uint16] | NDArray[np.uint32]


@dataclass(frozen=True)
class Tokens:
    """The tokens of a split: ids [n], of any unsigned integer type, possibly memory-mapped.

    `sequences` False: one stream of documents, each ended by its end-of-document token, cut into windows anywhere.
    True: independent sequences of `length + 1` tokens each, which are the samples.
    """

    ids: Ids
    sequences: bool = False


class TokenSource(Protocol):
    """Protocol of a source of tokens; no base class is needed."""

    @property
    def vocab_size(self) -> int: ...

    def prepare(self) -> None:
        """Check or create the data. Runs in one process per machine, before `load`."""
        ...

    def load(self) -> dict[str, Tokens]:
        """Open "train", "val" and "test". Runs in every process; must return equal arrays in each."""
        ...


def load_tokens(source: TokenSource, vocab_size: int) -> dict[str, Tokens]:
    """Return the splits of a source, which must have `vocab_size` tokens."""
    with using(source, "loaded"):
        splits = source.load()
    if source.vocab_size != vocab_size:
        raise UserError(
            f"data.vocab_size={vocab_size} is not what the source {type(source).__name__} has: set "
            f"data.vocab_size={source.vocab_size}, or change data.source."
        )
    return splits


class TokenLoader(EpochLoader):
    """Batches (x, y) of windows of tokens, both int64 [batch, length]: y is x one token later.

    Training on a stream: the stream is a circle, cut into windows of `length` targets from an offset that is drawn for
    each epoch; the order of the windows is EpochLoader's permutation. In an epoch every token is a target once, except
    for the fewer than `length` tokens left over, which vary by epoch, and the incomplete last batch. Offset and order
    depend on (seed, epoch). Evaluation of a stream: consecutive windows from its first token on; every token but the
    first is a target once. y is -100 where the last window or batch is not full.

    Args:
        tokens: at least `length + 1`.
        length: of a window, in targets.
        device: of the batches.
        order: as in `EpochLoader`: batch_size (in windows), seed, rank, world_size, train, shuffle, limit.
    """

    goes_ahead = True

    def __init__(
        self, tokens: Tokens, length: int, *, device: torch.device | None = None, train: bool = False, **order: Any
    ) -> None:
        self.ids, self.sequences = tokens.ids, tokens.sequences
        self.length = length
        self.device = device or torch.device("cpu")
        size = len(self.ids)
        in_stream = size // length if train else -(-(size - 1) // length)
        windows = size // (length + 1) if tokens.sequences else in_stream
        super().__init__(windows, train=train, **order)

    def _batches(self, epoch: int, first: int) -> Iterator[Batch]:
        rows, counts = self.rank_rows(epoch)
        size = len(self.ids)
        moved = self.train and self.shuffle and not self.sequences
        start = hashed_seed(self.seed, "offset", epoch) % size if moved else 0
        begins = start + rows.numpy() * (self.length + int(self.sequences))
        places = np.arange(self.length + 1)
        for begin, counted in zip(begins[first:], counts[first:], strict=True):
            at = begin[:, None] + places
            window = torch.from_numpy(self.ids[at % size].astype(np.int64))
            x, y = (
                window[:, :-1].clone(),
                window[:, 1:].clone(),
            )  # not contiguous(): with one row both would share memory
            if not self.train:
                y[~(torch.from_numpy(at[:, 1:] < size) & counted[:, None])] = IGNORE
            yield x.to(self.device, non_blocking=True), y.to(self.device, non_blocking=True)


class TokenDataModule(ExactDataModule[Tokens]):
    """Train, validation and test loaders over a source of tokens, equal on any number of devices.

    The arguments are the keys of configs/data/tokens.yaml, which describes them.
    """

    @validated
    def __init__(
        self,
        source: TokenSource,
        vocab_size: Annotated[int, Field(ge=2)],
        length: Count,
        batch_size: Count,
        eval_batch_size: Count | None = None,
        seed: Seed = 0,
    ) -> None:
        super().__init__(batch_size, eval_batch_size, seed)
        check_members(source, "vocab_size", "prepare", "load")
        self.source = source
        self.vocab_size = vocab_size
        self.length = length

    def open(self) -> dict[str, Tokens]:
        """Return all splits of the source, checked against what was declared."""
        splits = load_tokens(self.source, self.vocab_size)
        for name, tokens in splits.items():
            if len(tokens.ids) <= self.length:
                raise UserError(
                    f"data.length={self.length} needs {self.length + 1} tokens and the {name} split has "
                    f"{len(tokens.ids)}: choose a smaller data.length, or prepare more text."
                )
        return splits

    def build(self, split: Tokens, device: torch.device, **order: Any) -> TokenLoader:
        return TokenLoader(split, self.length, device=device, **order)
