"""Checks of a source's data, for data modules and writers of shards."""

import inspect
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lathe.data.base import SPLITS
from lathe.data.splits import Labels, Source, Split, Splits
from lathe.errors import UserError, refuse, under, user_location

KEY = "data.source"
IMAGES = "expected a uint8 numpy array [m, channels, height, width]"


def check_members(source: object, *names: str) -> None:
    """Raise UserError if `source` lacks one of `names`, without evaluating any."""
    lacking = [name for name in names if inspect.getattr_static(source, name, None) is None]
    if lacking and not hasattr(type(source), "__getattr__"):
        raise UserError(
            f"{KEY}: {_kind(source)} has no {' and no '.join(lacking)}, expected a source with {', '.join(names)}."
        )


@contextmanager
def using(source: object, what: str, key: str = KEY) -> Iterator[None]:
    """Convert an exception of a user's source, which was to be `what`, to a UserError with its location."""
    try:
        with under(key):
            yield
    except UserError:
        raise
    except Exception as error:
        if type(source).__module__.split(".")[0] == __name__.split(".")[0]:
            raise
        said = " ".join(f"{type(error).__name__}: {error}".split())[:500]
        frame = traceback.extract_tb(error.__traceback__)[-1]
        place = user_location(error) or f" ({frame.filename}:{frame.lineno})"
        raise UserError(f"{key} can't be {what}: {said}{place}") from error


def load_splits(source: Source, facts: Mapping[str, int] | None = None) -> Splits:
    """Return the splits of a source of images, with int64 labels, after checking them.

    `facts` are `num_classes`, `channels` and `image_size` as declared under data; None checks the splits only.

    Raises:
        UserError: one message for each mistake, or the error of `load`.
    """
    with using(source, "loaded"):
        given, classes = source.load(), source.num_classes
    splits: dict[str, Any] = {name: getattr(given, name, None) for name in SPLITS}
    if not all(hasattr(split, part) for split in splits.values() for part in ("images", "labels", "rows", "read")):
        got = _kind(given)
        if isinstance(given, Splits):
            got += " of " + ", ".join(_kind(split) for split in splits.values())
        raise UserError(
            f"{KEY}: load() of {type(source).__name__} gave {got}, expected lathe.data.Splits of three "
            "lathe.data.Split."
        )
    refuse(_mistakes(type(source).__name__, classes, splits, facts or {}))
    for name in ("val", "test"):
        if not len(splits[name].rows):
            rank_zero_warn(f"{KEY}: the {name} split has no samples, so nothing can be measured on it.")
    return Splits(**{name: _as_int64(split) for name, split in splits.items()})


def _mistakes(name: str, classes: Any, splits: Mapping[str, Split], facts: Mapping[str, int]) -> Iterator[str]:
    wrong = [sentence for split in splits for sentence in _of_split(split, splits[split], classes)]
    if not isinstance(classes, (int, np.integer)) or isinstance(classes, bool):
        wrong.append(f"{KEY}: num_classes of {name} is {classes!r}, expected a whole number.")
    yield from wrong
    if wrong:
        return  # the checks below need valid splits
    _, channels, height, width = splits["train"].images.shape
    found = {"num_classes": classes, "channels": channels, "image_size": max(height, width)}
    for key, value in facts.items():
        if value != found[key]:
            yield (
                f"data.{key}={value} is not what the source {name} has: set data.{key}={found[key]}, or change "
                "data.source."
            )
    for split in ("val", "test"):
        shape = list(splits[split].images.shape[1:])
        if shape != [channels, height, width]:
            yield f"{KEY}: images of the {split} split are {shape}, expected {[channels, height, width]} as in train."
    if not len(splits["train"].rows):
        yield f"{KEY}: the train split has no rows, expected some to train on."
    for one, other in combinations(SPLITS, 2):
        shared = _shared(splits[one], splits[other])
        if shared:
            yield (
                f"{KEY}: the {one} and {other} splits share {shared} images, expected none: divide them by their rows."
            )


def _of_split(name: str, split: Split, classes: Any) -> Iterator[str]:
    """Yield the mistakes of one split."""
    start, images, labels, rows = f"{KEY}: the {name} split's", split.images, split.labels, split.rows
    if getattr(images, "dtype", None) != np.uint8 or len(images.shape) != 4:
        yield f"{start} images are {_kind(images)}, {IMAGES}."
        return
    m = len(images)
    if not _whole_numbers(labels):
        yield f"{start} labels are {_kind(labels)}, expected an int64 numpy array [m]."
    elif len(labels) != m:
        yield f"{start} labels are {len(labels)} for {m} images, expected as many."
    if not _whole_numbers(rows):
        yield f"{start} rows are {_kind(rows)}, expected an int64 numpy array [n] of numbers from 0 to {m - 1}."
    elif len(rows) and not 0 <= rows.min() <= rows.max() < m:
        yield f"{start} rows go from {rows.min()} to {rows.max()}, expected numbers from 0 to {m - 1}."
    elif _whole_numbers(labels) and len(labels) == m and len(rows) and isinstance(classes, (int, np.integer)):
        used = labels[rows]
        if not 0 <= used.min() <= used.max() < classes:
            yield f"{start} labels go from {used.min()} to {used.max()}, expected 0 to {classes - 1}."


def _whole_numbers(array: Any) -> bool:
    """Return whether it is an array [n] of integers, not a mask."""
    return isinstance(array, np.ndarray) and array.ndim == 1 and np.issubdtype(array.dtype, np.integer)


def _shared(one: Split, other: Split) -> int:
    """Return the number of images that two splits share in memory; copies are not found."""
    if one.images is other.images:
        return len(np.intersect1d(one.rows, other.rows))
    return len(np.intersect1d(_addresses(one), _addresses(other)))


def _addresses(split: Split) -> Labels:
    """Return the memory address of each image, int64 [n]; empty if images are not such an array."""
    images, rows = split.images, split.rows.astype(np.int64)
    if not isinstance(images, np.ndarray) or not images.size or not images.strides[0]:
        return rows[:0]
    return rows * images.strides[0] + images.ctypes.data


def _as_int64(split: Split) -> Split:
    if split.labels.dtype == split.rows.dtype == np.int64:
        return split
    return replace(split, labels=split.labels.astype(np.int64), rows=split.rows.astype(np.int64))


def _kind(value: object) -> str:
    """Describe a value for a message: an array's dtype and shape, else its class."""
    if value is None:
        return "None"
    kind, shape = getattr(value, "dtype", None), getattr(value, "shape", None)
    if kind is not None and shape is not None:
        return f"{kind} {list(shape)}"
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeioAEIO' else 'a'} {name}"
