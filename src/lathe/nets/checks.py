"""What a user may have typed wrongly into `model.net`, said in one sentence before any tensor is made."""

from lathe.errors import UserError


def whole_number(key: str, value: object, *, least: int = 1) -> None:
    """Raise UserError unless `model.net.<key>` is a whole number of at least `least`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise UserError(f"model.net.{key}={value!r} must be a whole number of at least {least}: set model.net.{key} to one.")


def probability(key: str, value: float) -> None:
    """Raise UserError unless `model.net.<key>` lies in [0, 1)."""
    if not isinstance(value, int | float) or not 0 <= value < 1:
        raise UserError(
            f"model.net.{key}={value!r} is not a probability in [0, 1): set model.net.{key} to one, 0 switches it off."
        )
