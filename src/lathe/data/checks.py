"""Checks that data modules share: class names, declared facts, and a user's sources."""

import inspect
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from numpy.typing import NDArray
from torch import Tensor

from lathe.errors import UserError, require, under, user_location
from lathe.files import disk_reason

IMAGE_FACTS = ("channels", "image_size", "mean", "std", "num_classes")
TOKEN_FACTS = ("length", "vocab_size")


def form(sample: Any) -> str:
    """Describe a sample in short: shapes of arrays, within tuples and dicts."""
    if isinstance(sample, (Tensor, np.ndarray)):
        return f"{str(sample.dtype).removeprefix('torch.')} {list(sample.shape)}"
    if isinstance(sample, Mapping):
        return "{" + ", ".join(f"{name}: {form(value)}" for name, value in sample.items()) + "}"
    if isinstance(sample, (tuple, list)):
        short = len(sample) <= 8
        return f"({', '.join(map(form, sample))})" if short else f"a {type(sample).__name__} of {len(sample)}"
    return "None" if sample is None else type(sample).__name__


def check_members(source: object, *names: str) -> None:
    """Raise UserError if `source` lacks one of `names`, without evaluating any."""
    lacking = [name for name in names if inspect.getattr_static(source, name, None) is None]
    if lacking and not hasattr(type(source), "__getattr__"):
        raise UserError(
            f"data.source: {type(source).__name__} has no {' and no '.join(lacking)}, expected a source with "
            f"{', '.join(names)}."
        )


@contextmanager
def using(source: object, what: str, key: str = "data.source") -> Iterator[None]:
    """Convert an exception of `source`, which was to be `what`, to a UserError with its place in the user's code."""
    try:
        with under(key):
            yield
    except UserError:
        raise
    except Exception as error:
        if isinstance(error, OSError) and disk_reason(error) is not None:
            raise  # it has a message of its own
        message = " ".join(f"{type(error).__name__}: {error}".split())[:500]
        frame = traceback.extract_tb(error.__traceback__)[-1]
        location = user_location(error) or f" ({frame.filename}:{frame.lineno})"
        raise UserError(f"{key} can't be {what}: {message}{location}") from error


@cache
def warn_once(sentence: str) -> None:
    """Warn on rank 0, once per process for the same sentence."""
    rank_zero_warn(sentence)


def check_class_names(names: Sequence[str] | None, num_classes: int) -> list[str] | None:
    """Return the names; raise UserError if they are not `num_classes` different strings."""
    if names is None:
        return None
    require(
        len(names) == num_classes,
        f"data.class_names has {len(names)} names for data.num_classes={num_classes}: give one for each class.",
    )
    (name, count), *_ = Counter(names).most_common(1)
    require(count == 1, f"data.class_names has {name} twice: give each class a name of its own.")
    return list(names)


def first_few(names: Sequence[str]) -> str:
    """Return the first of these names, and the number of the others."""
    more = len(names) - 5
    return ", ".join(names[:5]) + (f" and {more} more" if more > 0 else "")


def class_name(label: int, names: Sequence[str] | None) -> str:
    """Return a class's name, or its number if it has none or is not a class."""
    return names[label] if names is not None and 0 <= label < len(names) else f"class {label}"


def warn_missing_classes(
    key: str, labels: NDArray[np.int64], rows: Mapping[str, NDArray[np.int64]], names: Sequence[str] | None, fix: str
) -> None:
    """Warn of classes in `labels` [n] that a split, by its `rows`, does not have: its metrics do not cover them."""
    shown = [
        f"{split} has none of {first_few([class_name(label, names) for label in absent.tolist()])}"
        for split, split_rows in rows.items()
        if len(absent := np.setdiff1d(labels, labels[split_rows]))
    ]
    if shown:
        rank_zero_warn(f"{key}: {', and '.join(shown)}, so its metrics do not cover them: {fix}.")


def squashed(data: Mapping[str, Any]) -> bool:
    """Return whether a run's images were scaled whole, so that images for its net have to be as well."""
    source = data.get("source")
    return isinstance(source, Mapping) and source.get("resize") == "squash"


def undeclared(data: Mapping[str, Any]) -> str | None:
    """Return what a run's `data` lacks to know the net's input, as the end of a sentence, or None."""
    images, tokens = ([key for key in keys if data.get(key) is None] for keys in (IMAGE_FACTS, TOKEN_FACTS))
    if not images or not tokens:
        return None
    if len(images) == len(IMAGE_FACTS) and len(tokens) == len(TOKEN_FACTS):
        return f"neither {', '.join(images)}, which images need, nor {', '.join(tokens)}, which tokens need"
    return f"no {', '.join(tokens if len(images) == len(IMAGE_FACTS) else images)}"


def check_declared(data: Mapping[str, Any], run: object) -> None:
    """Raise UserError if the data of `run` do not declare enough to know the net's input."""
    missing = undeclared(data)
    require(
        missing is None,
        f"run={run}: its data declare {missing}, so the input of its net is unknown: set them under data "
        "in the run's config.yaml, such as mean: [0.5]. A data module of your own takes them as arguments.",
    )
