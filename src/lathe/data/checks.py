"""What a user may type for a number."""

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
