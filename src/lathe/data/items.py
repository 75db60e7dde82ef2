"""The samples of a dataset of any kind, as a task wants them: columns, transforms, batches, and what is wrong with
them.
"""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.utils.data import Subset, TensorDataset, default_collate, get_worker_info

from lathe.data.forms import form, mixed
from lathe.data.pairs import FIRST, Pairs, Sent
from lathe.data.seeded import Reads, Rowed, draws_nothing, fetch
from lathe.data.splits import Labels
from lathe.errors import UserError, item_note


class Items(Reads):
    """Some rows of a dataset as (input, target), or as they come.

    Args:
        dataset: with `__len__` and `__getitem__`.
        key: of the configuration, in messages.
        rows: which of the dataset's samples; None is all.
        columns: names of input and target in samples that are dicts; None leaves the samples as they are.
        transform: of the input; of the whole sample where that is a dict and no columns are named.
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
        self.stacked = False  # whether batches are torch's own, so that pairs may be stacked while they are read
        self._part = FIRST  # samples that are read at a time, as the last batch would have it

    def __len__(self) -> int:
        return len(self.dataset) if self.rows is None else len(self.rows)

    def row(self, number: int) -> int:
        """Which sample of the dataset this one is."""
        return number if self.rows is None else int(self.rows[number])

    def name(self, number: int) -> str:
        """What the sample is called in messages."""
        return f"{self.key}: item {self.row(number)}"

    def __getitem__(self, number: int) -> Any:
        return self.made(self.dataset[self.row(number)], number)

    def __getitems__(self, numbers: Sequence[int]) -> Any:
        return self.read(numbers, None)

    def read(self, rows: Sequence[int], steps: Iterator[Any] | None) -> Rowed | Pairs:
        """The samples for `Collate`; as `Reads` has it."""
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
        # steps come last: where there is no further row, none is taken
        taken = rows if steps is None else (row for row, _ in zip(rows, steps))  # noqa: B905
        if plain:
            return self._each(rows, (dataset[row] for row in taken))
        return self._each(rows, (self.made(dataset[row], number) for row, number in zip(taken, numbers)))  # noqa: B905

    def _each(self, rows: Sequence[int], samples: Iterator[Any]) -> list[Any]:
        """The samples of the rows; one that raises is noted down with what it raises."""
        found: list[Any] = []
        try:
            found.extend(samples)
        except Exception as error:
            if len(found) < len(rows):  # else it is no sample's: there are more of them than were asked for
                error.add_note(item_note(self.key, rows[len(found)]))
            raise
        return found

    def made(self, sample: Any, number: int) -> Any:
        """What the dataset has given, as a task wants it."""
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
    """The samples of a batch, one by one."""
    return Rowed(samples.samples(), samples.rows) if isinstance(samples, Pairs) else samples


@dataclass(frozen=True)
class Refused:
    """Stands for a batch that can't be made, until the process that can say so has it."""

    sentences: tuple[str, ...]


def taken(batch: Any) -> Any:
    """The batch; raises UserError where it could not be made."""
    if isinstance(batch, Refused):
        raise UserError(*batch.sentences)
    return batch.whole() if isinstance(batch, Sent) else batch


def all_taken(batches: Iterator[Any]) -> Iterator[Any]:
    """Each batch; where one could not be made, it is raised where that was read, and so ends who reads."""
    for batch in batches:
        try:
            found = taken(batch)
        except UserError as error:
            if isinstance(batches, Generator):
                batches.throw(error)
            raise
        yield found


class Collate:
    """Makes a batch out of samples, and looks at it.

    Args:
        items: that the samples are of.
        collate: the user's own; None is torch's default.
        num_classes: what class numbers are held against; None: targets are not looked at.
    """

    def __init__(self, items: Items, collate: Callable[[list[Any]], Any] | None, num_classes: int | None) -> None:
        self.items, self.collate, self.num_classes = items, collate, num_classes
        self.draws_nothing = items.stacked = collate is None

    def __call__(self, samples: Rowed | Pairs) -> Any:
        try:
            batch = self._made(samples)
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
        except Exception as error:  # torch raises of many kinds here
            raise UserError(self._odd(read, error)) from error
        if mixed(read):  # whose integers, such as pixels up to 255, torch takes among the others as they are
            raise UserError(self._odd(read, TypeError("floats and integers")))
        return self._checked(made, read)

    def _are_classes(self, numbers: Sequence[int]) -> bool:
        return self.num_classes is None or (min(numbers) >= 0 and max(numbers) < self.num_classes)

    def _odd(self, samples: Rowed, error: Exception) -> str:
        """Why torch can't stack the samples."""
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
        if not isinstance(y, Tensor) or y.is_floating_point() or y.dtype == torch.bool:
            return batch
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


def check_target(batch: Any, items: Items, num_classes: int) -> None:
    """Raises UserError where the targets of a batch are no class numbers, and no scores of `num_classes` classes."""
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        return
    y = batch[1]
    expected = f"expected a whole number from 0 to {num_classes - 1}, or {num_classes} scores of classes, as"
    got = f"a list of {form(y[0])}" if isinstance(y, (tuple, list)) and len(y) else form(y)
    scores = isinstance(y, Tensor) and y.ndim > 1 and y.shape[1] == num_classes
    numbers = isinstance(y, Tensor) and not y.is_floating_point() and not (y.ndim == 2 and y.shape[1] == 1)
    if not scores and not numbers:
        raise UserError(
            f"{items.key}: targets of a batch are {got}, {expected} data.num_classes={num_classes} says: change the "
            "dataset's targets, or set data.num_classes=null for a task that takes them so."
        )


def tell_undivided(batch: Any, items: Items) -> None:
    """Warns that a split is cut without regard to classes, where targets are a class number each: values and labels
    have none.
    """
    y = batch[1] if isinstance(batch, (tuple, list)) and len(batch) == 2 else None
    if isinstance(y, Tensor) and y.ndim == 1 and not y.is_floating_point():
        rank_zero_warn(
            f"{items.key}: {type(items.dataset).__name__} has no labels at hand (an attribute targets or labels), so "
            "it is divided without regard to its classes."
        )


def check_pixels(image: Any, items: Items, transform: str, precision: str) -> None:
    """Raises UserError where an image is not of floating point as a net of this precision takes it."""
    dtype = str(image.dtype).removeprefix("torch.")
    others = {"float32": True, "float64": precision.startswith("64")}
    half = dtype in ("float16", "bfloat16") and precision.startswith(("16", "bf16", "transformer"))
    if not (others.get(dtype, False) or half):
        raise UserError(
            f"{items.key}: item {items.row(0)} is an image of {dtype}, expected float32: convert it in the dataset or "
            f"by {transform}, pixels / 255 less data.mean over data.std."
        )


def labels_at_hand(dataset: Any, target: str | None) -> Labels | None:
    """The class numbers of all samples, int64 [n], where they can be had without reading the samples: the last of a
    TensorDataset's tensors, a Hugging Face dataset's column `target`, or an attribute `targets` or `labels`. None where
    there are none of these."""
    n = len(dataset)
    if isinstance(dataset, Subset):
        inner = labels_at_hand(dataset.dataset, target)
        return None if inner is None else inner[np.asarray(dataset.indices, dtype=np.int64)]
    found: Any = None
    if isinstance(dataset, TensorDataset):
        found = dataset.tensors[-1]
    elif target is not None and target in (getattr(dataset, "column_names", None) or ()):
        found = dataset[target]
    else:
        found = next(
            (value for name in ("targets", "labels") if (value := getattr(dataset, name, None)) is not None), None
        )
    try:
        labels = np.asarray(found[:] if hasattr(found, "__getitem__") else found)
    except (TypeError, ValueError):
        return None
    return labels.astype(np.int64) if labels.shape == (n,) and labels.dtype.kind in "iu" else None
