"""Text as samples: windows of tokens, or whole documents under a budget of padded tokens; their data modules."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from lathe.config.types import Count, Seed
from lathe.config.validation import validated
from lathe.data.base import ExactDataModule, replicas_of
from lathe.data.checks import check_members, using
from lathe.data.order import IGNORE, Batch, EpochLoader
from lathe.data.random import hashed_seed
from lathe.data.transfer import needs_no_trainer
from lathe.errors import UserError, require

Ints = NDArray[np.int64]
Ids = NDArray[np.uint8] | NDArray[np.uint16] | NDArray[np.uint32]
SCANNED = 2**24  # tokens that are searched at a time for the ends of documents


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
        is_circle = self.train and self.shuffle and not self.sequences
        start = hashed_seed(self.seed, "offset", epoch) % size if is_circle else 0
        first_tokens = start + rows.numpy() * (self.length + int(self.sequences))
        places = np.arange(self.length + 1)
        for first_token, counted in zip(first_tokens[first:], counts[first:], strict=True):
            index = first_token[:, None] + places
            window = torch.from_numpy(self.ids[index % size].astype(np.int64))
            x, y = window[:, :-1].clone(), window[:, 1:].clone()  # not contiguous(): one row would share its memory
            if not self.train:
                y[~(torch.from_numpy(index[:, 1:] < size) & counted[:, None])] = IGNORE
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
        self.source, self.vocab_size, self.length = source, vocab_size, length

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


@dataclass(frozen=True)
class Documents:
    """The documents of a split: `ids` from `starts` to `stops` (exclusive), int64 [documents].

    A document includes its end-of-document token `end`. The token before a document is its first input, so that each of
    its tokens is a target.
    """

    ids: Ids
    starts: Ints
    stops: Ints
    end: int

    @property
    def lengths(self) -> Ints:
        """Return the number of targets of each document, its end included; int64 [documents]."""
        return self.stops - self.starts

    def cut(self, length: int) -> "Documents":
        """Return the documents truncated to their first `length` targets."""
        return Documents(self.ids, self.starts, np.minimum(self.stops, self.starts + length), self.end)

    def split(self, length: int) -> "Documents":
        """Return the documents in pieces of at most `length` targets; each continues the one before."""
        pieces = -(-self.lengths // length)
        first = np.repeat(np.cumsum(pieces) - pieces, pieces)
        starts = np.repeat(self.starts, pieces) + (np.arange(pieces.sum()) - first) * length
        return Documents(self.ids, starts, np.minimum(np.repeat(self.stops, pieces), starts + length), self.end)


def find_documents(ids: Ids, end: int) -> Documents:
    """Split a stream after each `end`. The rest after the last one is a document without an end."""
    ends = [np.flatnonzero(ids[start : start + SCANNED] == end) + start for start in range(0, len(ids), SCANNED)]
    stops = np.concatenate([*ends, np.empty(0, dtype=np.int64)]).astype(np.int64) + 1
    if len(ids) and (not len(stops) or stops[-1] != len(ids)):
        stops = np.append(stops, len(ids))
    return Documents(ids, np.concatenate([np.zeros(1, dtype=np.int64), stops])[: len(stops)], stops, end)


def round_up(length: int, multiple: int) -> int:
    """Round a length up to a multiple of `multiple`."""
    return -(-length // multiple) * multiple


def plan_buckets(
    lengths: Ints, max_tokens: int, max_batch_size: int, growth: float, multiple: int
) -> tuple[Ints, Ints, Ints]:
    """Pack samples of `lengths` int64 [samples] in batches of at most `max_tokens` tokens, padded to their longest.

    Samples are sorted by descending length and divided into buckets. A bucket has lengths down to its longest divided
    by `growth`, at least 1, and then shorter samples until its batches are full, so only the very last batch can be
    smaller. The size of a batch follows from the longest sample of its bucket, not from the samples drawn, and an epoch
    only permutes samples within their buckets. So the length of an epoch is known before training, as learning-rate
    schedules need it. Padded lengths are rounded up to a `multiple`.

    Returns:
        Samples by descending length, int64 [samples]; the bucket of each, ascending; and int64 bounds [batches + 1]:
        batch k is places bounds[k] to bounds[k + 1], within one bucket.
    """
    order = np.argsort(-lengths, kind="stable")
    falling = lengths[order]
    rising = -falling
    bucket, bounds, start = np.empty(len(order), dtype=np.int64), [0], 0
    number = 0
    while start < len(order):
        longest = int(falling[start])
        size = min(max_batch_size, max_tokens // round_up(longest, multiple))
        stop = int(np.searchsorted(rising, -longest / growth, side="right"))
        stop = min(len(order), start + -(-(stop - start) // size) * size)
        bucket[start:stop] = number
        bounds += [*range(start + size, stop, size), stop]
        start, number = stop, number + 1
    return order, bucket, np.array(bounds)


class DocumentLoader(EpochLoader):
    """Batches of whole documents, padded at their ends: (x, y, count) in training, (x, y) in evaluation.

    x and y are int64 [rows, time], y being x one token later; a document's first x is the preceding end-of-document
    token. Padding has the target -100. `time` is the longest document of the *global* batch, so all ranks have the same
    shape. Row i of the global batch is on rank i modulo the number of ranks; missing rows of a rank are filled with
    rows without targets. `count` (int64, 0-dim) is the number of targets of the global batch, an integer, which half
    precision does not round; the data module divides it by the number of ranks in the transfer.

    The batches of an epoch depend on (seed, epoch, lengths, budget) only, see `plan_buckets`. EpochLoader treats a
    global batch as one sample, and permutes batches. No document is left out. Evaluation is in descending order of
    length.

    Args:
        documents: at least one.
        max_tokens: of a global batch with padding, but without filled rows (for `row_multiple` 1 at most one per rank).
        max_batch_size: most documents of a global batch.
        growth: of the buckets' lengths, at least 1; None for a single bucket.
        pad_multiple: `time` is a multiple of this.
        row_multiple: each rank's rows are filled up to a multiple of this.
        device: of the batches.
        train, shuffle, seed, rank, world_size, limit: as in `EpochLoader`.
    """

    goes_ahead = True

    def __init__(
        self,
        documents: Documents,
        *,
        max_tokens: int,
        max_batch_size: int,
        growth: float | None = 1.1,
        pad_multiple: int = 1,
        row_multiple: int = 1,
        device: torch.device | None = None,
        rank: int = 0,
        world_size: int = 1,
        **order: Any,
    ) -> None:
        self.documents = documents
        self.lengths = documents.lengths
        budget = max_tokens, max_batch_size, growth or np.inf, pad_multiple
        self.sorted, self.bucket, self.bounds = plan_buckets(self.lengths, *budget)
        self.pad_multiple, self.row_multiple = pad_multiple, row_multiple
        self.device = device or torch.device("cpu")
        super().__init__(len(self.bounds) - 1, batch_size=1, **order)  # a global batch is one sample of EpochLoader
        self.rank, self.world_size = rank, world_size

    def global_batches(self, epoch: int) -> list[Ints]:
        """Return the documents of each global batch of an epoch, in order; equal on all ranks."""
        samples = self.sorted
        if self.train and self.shuffle:
            generator = torch.Generator().manual_seed(hashed_seed(self.seed, "buckets", epoch))
            keys = torch.rand(len(samples), generator=generator, dtype=torch.float64).numpy()
            # stable: equal keys have the same order on every machine
            samples = samples[np.argsort(self.bucket + keys, kind="stable")]
        batches = np.split(samples, self.bounds[1:-1])
        return [batches[number] for number in self.rank_rows(epoch)[0].flatten().tolist()]

    def _batches(self, epoch: int, first: int) -> Iterator[tuple[Tensor, ...]]:  # type: ignore[override]  # also yields the count
        ids, end = self.documents.ids, self.documents.end
        for batch in self.global_batches(epoch)[first:]:
            rows = -(-len(batch) // self.world_size)
            time = round_up(int(self.lengths[batch].max()), self.pad_multiple)
            shape = (round_up(rows, self.row_multiple), time)
            x, y = np.full(shape, end, dtype=np.int64), np.full(shape, IGNORE, dtype=np.int64)
            for row, document in enumerate(batch[self.rank :: self.world_size]):
                start, stop = self.documents.starts[document], self.documents.stops[document]
                x[row, 0] = ids[start - 1] if start else end
                x[row, 1 : stop - start] = ids[start : stop - 1]
                y[row, : stop - start] = ids[start:stop]
            parts = [torch.from_numpy(x), torch.from_numpy(y)]
            if self.train:
                parts.append(torch.tensor(int(self.lengths[batch].sum())))
            yield tuple(part.to(self.device, non_blocking=True) for part in parts)


class DocumentDataModule(ExactDataModule[Documents]):
    """Train, validation and test loaders over documents, equal on any number of devices.

    The arguments are the keys of configs/data/documents.yaml, which describes them.
    """

    @validated
    def __init__(
        self,
        source: TokenSource,
        vocab_size: Annotated[int, Field(ge=2)],
        length: Count,
        max_tokens: Count,
        max_batch_size: Count,
        batch_size: Count | None = None,
        eval_batch_size: Count | None = None,
        long: Literal["refuse", "split", "cut"] = "refuse",
        bucket_growth: Annotated[float, Field(ge=1)] | None = 1.1,
        pad_multiple: Count = 1,
        row_multiple: Count = 1,
        seed: Seed = 0,
    ) -> None:
        require(
            batch_size in (None, max_batch_size),
            f"data.batch_size={batch_size} is data.max_batch_size={max_batch_size} here: set that alone.",
        )
        require(length % pad_multiple == 0, f"data.pad_multiple={pad_multiple} has to divide data.length={length}.")
        super().__init__(max_batch_size, eval_batch_size, seed)
        check_members(source, "vocab_size", "prepare", "load")
        self.source, self.vocab_size, self.length, self.long = source, vocab_size, length, long
        self.max_tokens, self.max_batch_size = max_tokens, max_batch_size
        self.shape = {"growth": bucket_growth, "pad_multiple": pad_multiple, "row_multiple": row_multiple}
        self.cut_tokens: dict[str, int] = {}

    @needs_no_trainer
    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Move a batch, and divide its count by the replicas.

        So a loss summed over targets and divided by the count averages, over ranks, to the mean of the global batch.
        """
        x, y, *count = super().transfer_batch_to_device(batch, device, dataloader_idx)
        return (x, y, *(number.float() / replicas_of(self.trainer)[0] for number in count))

    def open(self) -> dict[str, Documents]:
        """Return the documents of all splits, checked; `cut_tokens` counts the tokens that `long=cut` removed."""
        splits = load_tokens(self.source, self.vocab_size)
        source: Any = self.source  # token files have the token that ends a document in `meta`, other sources as `end`
        end: Any = source.end if hasattr(source, "end") else getattr(source, "meta", {}).get("end")
        kind = type(source).__name__
        require(end is not None, f"data.source={kind} has no end, the token that ends a document.")
        fitted = {}
        for name, tokens in splits.items():
            documents = find_documents(tokens.ids, int(end))
            lengths = documents.lengths
            require(len(lengths) > 0, f"data.source has no documents in its {name} split: prepare some text for it.")
            longest, sample = int(lengths.max()), int(lengths.argmax())
            require(
                longest <= self.length or self.long != "refuse",
                f"data.length={self.length} is too short for document {sample} of the {name} split, which has {longest}"
                " tokens: raise it, or set data.long=split or data.long=cut.",
            )
            documents = documents.split(self.length) if self.long == "split" else documents.cut(self.length)
            self.cut_tokens[name] = int(lengths.sum() - documents.lengths.sum())
            needed = round_up(int(documents.lengths.max()), int(self.shape["pad_multiple"] or 1))
            require(
                needed <= self.max_tokens,
                f"data.max_tokens={self.max_tokens}: document {sample} of {name} needs at least {needed}.",
            )
            fitted[name] = documents
        return fitted

    def build(self, split: Documents, device: torch.device, **order: Any) -> DocumentLoader:
        size = order.pop("batch_size")
        order |= self.shape
        return DocumentLoader(split, max_tokens=self.max_tokens, max_batch_size=size, device=device, **order)
