"""Thresholds of a suite's figures, and a message for each that is missed. Imports no torch."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from lathe.benchmark.spread import Spread, table
from lathe.errors import did_you_mean, require


class Threshold(NamedTuple):
    """A limit of a figure. Without `at_most` and `at_least` it is only shown; an unmeasured figure misses it."""

    sentence: str
    measured: Spread | None
    at_most: float | None = None
    at_least: float | None = None

    @property
    def met(self) -> bool:
        if self.measured is None:
            return self.at_most is None and self.at_least is None
        low = self.at_least is None or self.measured.median >= self.at_least
        return low and (self.at_most is None or self.measured.median <= self.at_most)

    @property
    def full(self) -> str:
        """The sentence with its limit."""
        if self.at_most is None and self.at_least is None:
            return self.sentence
        how = f"at least {self.at_least:.2f}" if self.at_most is None else f"at most {self.at_most:.2f}"
        return f"{self.sentence} {how}"

    def row(self) -> list[str]:
        """Return the sentence with its limit, the measured value, and whether the median meets it."""
        shown = str(self.measured or "not measured")
        if self.at_most is None and self.at_least is None:
            return [self.full, shown, ""]
        return [self.full, shown, "-" if self.measured is None else "met" if self.met else "missed"]


def rows(thresholds: Sequence[Threshold]) -> str:
    """Return the thresholds as a table."""
    return table(["threshold", "measured", ""], [threshold.row() for threshold in thresholds])


def missed(thresholds: Iterable[Threshold]) -> list[str]:
    """Return a message for each threshold that is not met or not measured."""
    return [
        f"missed: expected {threshold.full}, got {threshold.measured or 'no measurement'}."
        for threshold in thresholds
        if not threshold.met
    ]


def limits(request: Mapping[str, Any], possible: Mapping[str, float | None]) -> dict[str, float]:
    """Return the request's thresholds by name, or the suite's own.

    `possible` are the measured names, with the suite's limit or None.

    Raises:
        UserError: a threshold of an unmeasured figure, or `assert` without thresholds.
    """
    suite, given = request["suite"], request.get("thresholds")
    if given is None:
        found = {name: limit for name, limit in possible.items() if limit is not None}
    else:
        found = {str(name): float(limit) for name, limit in given.items()}
    for name in found:
        require(
            name in possible,
            f"thresholds.{name}: suite={suite} does not measure {name} as it is asked here; "
            f"{did_you_mean(name, possible) if possible else 'it has no thresholds.'}",
        )
    require(
        bool(found) or not request.get("assert"),
        f"assert=true: suite={suite} has no thresholds of its own for what is measured here: give some with "
        f"'thresholds={{{next(iter(possible), 'name')}: 1.0}}', or leave assert=true out.",
    )
    return found
