"""Checks of class names and of the facts that a data module declares."""

from collections import Counter
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from typing import Any

import numpy as np
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from numpy.typing import NDArray

from lathe.errors import ArgumentError, UserError

IMAGE_FACTS = ("channels", "image_size", "mean", "std", "num_classes")
TOKEN_FACTS = ("length", "vocab_size")
SHOWN = 5  # most names in a message


def check_number(key: str, value: object, least: float, most: float | None = None, whole: bool = True) -> None:
    """Raise ArgumentError if a number is not in [`least`, `most`], or if `whole` not an integer."""
    wanted = Integral if whole else Real
    fits = (
        isinstance(value, wanted)
        and not isinstance(value, bool)
        and least <= float(value) <= (float("inf") if most is None else most)
    )
    if not fits:
        kind = "a whole number" if whole else "a number"
        span = f"of {least:g} or more" if most is None else f"from {least:g} to {most:g}"
        raise ArgumentError(f"{key}={value} cannot be used: choose {kind} {span}.")


def check_class_names(names: Sequence[str] | None, num_classes: int) -> list[str] | None:
    """Return the names; raise UserError if they are not `num_classes` different strings."""
    if names is None:
        return None
    if isinstance(names, str) or not all(isinstance(name, str) and name for name in names):
        raise UserError(
            f"data.class_names={names} is no list of words: give one for each class, in quotes where it is a number."
        )
    if len(names) != num_classes:
        raise UserError(
            f"data.class_names has {len(names)} names for data.num_classes={num_classes}: give one for each class."
        )
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise UserError(f"data.class_names has {twice[0]} twice: give each class a name of its own.")
    return list(names)


def first_few(names: Sequence[str]) -> str:
    """Return the first of these names, and the number of the others."""
    more = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {more} more" if more > 0 else "")


def class_name(label: int, names: Sequence[str] | None) -> str:
    """Return a class's name, or its number if it has none or is not a class."""
    return names[label] if names is not None and 0 <= label < len(names) else f"class {label}"


def warn_missing_classes(
    key: str,
    labels: NDArray[np.int64],
    rows: Mapping[str, NDArray[np.int64]],
    names: Sequence[str] | None,
    fix: str,
) -> None:
    """Warn of classes in `labels` [n] that a split, by its `rows`, does not have: its metrics do not cover them."""
    missing = {split: np.setdiff1d(labels, labels[own]).tolist() for split, own in rows.items()}
    shown = [
        f"{split} has none of {first_few([class_name(label, names) for label in absent])}"
        for split, absent in missing.items()
        if absent
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
        return f"neither {_listed(images)}, which images need, nor {_listed(tokens)}, which tokens need"
    return f"no {_listed(tokens if len(images) == len(IMAGE_FACTS) else images)}"


def check_declared(data: Mapping[str, Any], run: object) -> None:
    """Raise UserError if the data of `run` do not declare enough to know the net's input."""
    missing = undeclared(data)
    if missing is not None:
        raise UserError(
            f"run={run}: its data declare {missing}, so nobody knows what its net takes: let the data module's class "
            "have them as arguments and give them under data (of this run: in its config.yaml)."
        )


def _listed(words: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))
