"""What every result.json holds, whichever version has written it. Imports no torch."""

from typing import Any

from lathe.errors import require

NEEDED = ("steps", "seconds")
COUNTS = ("steps", "devices", "epochs", "best_step", "parameters")
NUMBERS = ("seconds", "objective")


def checked(result: dict[str, Any], words: str) -> dict[str, Any]:
    """The `result` that a run directory has, whose sentences begin with `words`: counts are whole numbers from 0, and
    `seconds`, `objective` and everything whose name has a `/` in it are numbers or null.

    Raises:
        UserError: it lacks what every run writes at its end, or holds something else at one of these names.
    """
    way = "move it away, and train.py with resume brings the run to its end"
    require(bool(result), f"{words} is empty, as no run leaves it: {way}.")
    for name in NEEDED:
        require(name in result, f"{words} has no `{name}`, which every run writes at its end: {way}.")
    for name, value in result.items():
        count, number = name in COUNTS, name in NUMBERS or "/" in name
        fits = (_whole(value) if count else _number(value)) if count or number else True
        kind = "whole number" if count else "number"
        require(fits, f"{words} has {value!a:.60} for {name[:80]!a}, which is no {kind}: {way}.")
    return result


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _number(value: Any) -> bool:
    return value is None or isinstance(value, (int, float))
