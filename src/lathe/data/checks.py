"""What a user may type for a number, and for the names of classes."""

from collections import Counter
from collections.abc import Sequence
from numbers import Integral, Real

from lathe.errors import UserError


def check_number(key: str, value: object, least: float, most: float | None = None, whole: bool = True) -> None:
    """Checks a number that must lie from `least` to `most` (None: no bound) and, if asked, be whole.

    Raises:
        UserError: naming the key, if it is not so.
    """
    wanted = Integral if whole else Real
    fits = (
        isinstance(value, wanted)
        and not isinstance(value, bool)
        and least <= float(value) <= (float("inf") if most is None else most)
    )
    if not fits:
        kind = "a whole number" if whole else "a number"
        span = f"of {least:g} or more" if most is None else f"from {least:g} to {most:g}"
        raise UserError(f"{key}={value} cannot be used: choose {kind} {span}.")


def check_class_names(names: Sequence[str] | None, num_classes: int) -> list[str] | None:
    """The names as they are; None for none.

    Raises:
        UserError: they are not `num_classes` different words.
    """
    if names is None:
        return None
    if isinstance(names, str) or not all(isinstance(name, str) and name for name in names):
        raise UserError(f"data.class_names={names} is no list of words: give one for each class, in quotes where it is a number.")
    if len(names) != num_classes:
        raise UserError(f"data.class_names has {len(names)} names for data.num_classes={num_classes}: give one for each class.")
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise UserError(f"data.class_names has {twice[0]} twice: give each class a name of its own.")
    return list(names)
