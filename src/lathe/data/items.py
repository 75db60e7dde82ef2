"""The samples of any dataset as a task takes them: columns, transforms, batches, error messages."""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate, get_worker_info

from lathe.data.forms import INTEGERS, check_pairs, form, mixed
from lathe.data.pairs import FIRST, Pairs, Sent
from lathe.data.seeded import Reads, Rowed, draws_nothing, fetch
from lathe.data.splits import Labels
from lathe.errors import UserError


class Items(Reads):
    """Some rows of a dataset, as (input, target) or unchanged.

    Args:
        dataset: with `__len__` and `__getitem__`.
        key: of the configuration, for messages.
        rows: the dataset's samples to take; None for all.
        columns: keys of input and target in samples that are dicts; None leaves samples unchanged.
        transform: of the input; of the whole sample if that is a dict and there are no `columns`.
    """

    def __init__(
        self,
        dataset: Any,
        key: str,
        rows: Labels | None = None,
        columns: tuple[str, str] | None = None,
        transform: Callable[[Any], Any] | None = None,
    ) -> None:
        self.dataset, self.key, self.rows = dataset, key, rows
        self.columns, self.transform = columns, transform
        self.draws_nothing = transform is None and draws_nothing(dataset)
        self.stacked = False  # whether batches are torch's default, so that pairs can be stacked during reading
        self._part = FIRST  # samples to read at a time, from the last batch

    def __len__(self) -> int:
        return len(self.dataset) if self.rows is None else len(self.rows)

    def row(self, number: int) -> int:
        """Return the index of a sample in the dataset."""
        return number if self.rows is None else int(self.rows[number])

    def name(self, number: int) -> str:
        """Return a sample's name for messages."""
        return f"{self.key}: item {self.row(number)}"

    def __getitem__(self, number: int) -> Any:
        return self.made(self.dataset[self.row(number)], number)

    def __getitems__(self, numbers: Sequence[int]) -> Any:
        return self.read(numbers, None)

    def read(self, rows: Sequence[int], steps: Iterator[Any] | None) -> Rowed | Pairs:
        """Return the samples for `Collate`; see `Reads`."""
        numbers = rows
        rows = numbers if self.rows is None else self.rows[np.asarray(numbers)].tolist()
        if not self.stacked:
            return Rowed(self._some(rows, numbers, steps), numbers)
        at_once = steps is None and getattr(self.dataset, "__getitems__", None)
        pairs, start = Pairs(numbers), 0
        while start < len(rows):
            part = slice(start, len(rows) if at_once else start + self._part)
            pairs.add(self._some(rows[part], numbers[part], steps))
            start, self._part = part.stop, pairs.part
        return pairs

    def _some(self, rows: Sequence[int], numbers: Sequence[int], steps: Iterator[Any] | None) -> Sequence[Any]:
        dataset, plain = self.dataset, self.columns is None and self.transform is None
        if steps is None and (isinstance(dataset, Reads) or getattr(dataset, "__getitems__", None)):
            read: Sequence[Any] = fetch(dataset, rows)
            return read if plain else self._each(rows, (self.made(*one) for one in zip(read, numbers, strict=True)))
        # steps come last, so that none is consumed after the last row
        taken = rows if steps is None else (row for row, _ in zip(rows, steps))  # noqa: B905
        if plain:
            return self._each(rows, (dataset[row] for row in taken))
        return self._each(rows, (self.made(dataset[row], number) for row, number in zip(taken, numbers)))  # noqa: B905

    def _each(self, rows: Sequence[int], samples: Iterator[Any]) -> list[Any]:
        """Return the samples of the rows; note the row in an exception."""
        found: list[Any] = []
        try:
            found.extend(samples)
        except Exception as error:
            if len(found) < len(rows):  # otherwise no sample raised: there are more than requested
                error.add_note(f"while reading {self.key}: item {rows[len(found)]}")
            raise
        return found

    def made(self, sample: Any, number: int) -> Any:
        """Return a sample of the dataset as a task takes it."""
        if self.columns is not None:
            sample = tuple(self._column(sample, name, number) for name in self.columns)
        if self.transform is None:
            return sample
        if isinstance(sample, (tuple, list)):
            return (self.transform(sample[0]), *sample[1:])
        return self.transform(sample)

    def _column(self, sample: Any, name: str, number: int) -> Any:
        if not isinstance(sample, Mapping) or name not in sample:
            has = f"has the keys {', '.join(map(str, sample))}" if isinstance(sample, Mapping) else f"is {form(sample)}"
            raise UserError(
                f"{self.key}: item {self.row(number)} {has}, expected {name}, which data.input or data.target names."
            )
        return sample[name]


def listed(samples: Rowed | Pairs) -> Rowed:
    """Return the samples of a batch, one by one."""
    return Rowed(samples.samples(), samples.rows) if isinstance(samples, Pairs) else samples


@dataclass(frozen=True)
class Refused:
    """The error of a batch that can't be made, sent from a worker to the main process."""

    sentences: tuple[str, ...]


def taken(batch: Any) -> Any:
    """Return the batch, or raise UserError if it could not be made."""
    if isinstance(batch, Refused):
        raise UserError(*batch.sentences)
    return batch.whole() if isinstance(batch, Sent) else batch


def all_taken(batches: Iterator[Any]) -> Iterator[Any]:
    """Yield each batch; raise the error of one that could not be made inside the reading generator."""
    for batch in batches:
        try:
            found = taken(batch)
        except UserError as error:
            if isinstance(batches, Generator):
                batches.throw(error)
            raise
        yield found


class Collate:
    """Makes a batch by `collate` (None: torch's), and checks class numbers, and with `pairs` its form."""

    def __init__(
        self,
        items: Items,
        collate: Callable[[list[Any]], Any] | None,
        num_classes: int | None,
        pairs: bool = False,
    ) -> None:
        self.items, self.collate, self.num_classes, self.pairs = items, collate, num_classes, pairs
        self.draws_nothing = items.stacked = collate is None

    def __call__(self, samples: Rowed | Pairs) -> Any:
        try:
            batch = self._made(samples)
            if self.pairs and not isinstance(batch, Sent):
                check_pairs(batch, self.items.key)
        except UserError as error:
            return Refused(error.args)
        return batch

    def _made(self, samples: Rowed | Pairs) -> Any:
        if self.collate is not None:
            read = listed(samples)
            return self._checked(self.collate(list(read)), read)
        if isinstance(samples, Rowed):
            pairs = Pairs(samples.rows)
            pairs.add(samples)
            samples = pairs
        batch = samples.batch()
        if batch is not None and self._are_classes(batch.numbers):
            return batch.whole() if get_worker_info() is None else batch
        read = listed(samples)
        try:
            made = default_collate(list(read))
        except Exception as error:  # torch raises many types here
            raise UserError(self._odd(read, error)) from error
        if mixed(read):  # torch would stack integers, such as pixels up to 255, with floats
            raise UserError(self._odd(read, TypeError("floats and integers")))
        return self._checked(made, read)

    def _are_classes(self, numbers: Sequence[int]) -> bool:
        return self.num_classes is None or (min(numbers) >= 0 and max(numbers) < self.num_classes)

    def _odd(self, samples: Rowed, error: Exception) -> str:
        """Return why torch can't stack the samples."""
        ways = "use data.transform or data.eval_transform to make them alike, or a data.collate_fn"
        first = form(samples[0])
        for sample, number in zip(samples, samples.rows, strict=True):
            if form(sample) != first:
                return (
                    f"{self.items.key}: item {self.items.row(number)} is {form(sample)}, but item "
                    f"{self.items.row(samples.rows[0])} is {first}, so they make no batch: {ways}."
                )
        said = " ".join(str(error).split())[:200]
        return f"{self.items.key}: items such as {first} make no batch ({said}): {ways}."

    def _checked(self, batch: Any, samples: Rowed) -> Any:
        if self.num_classes is None or not isinstance(batch, (tuple, list)) or len(batch) != 2:
            return batch
        x, y = batch
        if not isinstance(y, Tensor) or y.dtype not in INTEGERS:
            return [x, y.long()] if isinstance(y, Tensor) and y.dtype == torch.bool and y.ndim == 1 else batch
        wrong = (y < 0) | (y >= self.num_classes)
        if wrong.any():
            where = int(wrong.flatten(1).any(1).nonzero()[0]) if y.ndim > 1 else int(wrong.nonzero()[0])
            value = int(y[wrong][0])
            which = self.items.row(samples.rows[where]) if len(y) == len(samples) else "of a batch"
            raise UserError(
                f"{self.items.key}: item {which} has the label {value}, expected 0 to {self.num_classes - 1} as "
                f"data.num_classes={self.num_classes} says."
            )
        return [x, y.long()]
