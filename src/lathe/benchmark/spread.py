"""Statistics over rounds: medians with their range, and ratios within a round."""

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

Results = dict[str, list[dict[str, Any]]]


class Spread:
    """The values of several rounds: median, lowest and highest."""

    def __init__(self, values: Sequence[float]) -> None:
        self.values = list(values)
        self.median, self.low, self.high = median(values), min(values), max(values)

    @property
    def short(self) -> str:
        return self._shown(2)

    def __str__(self) -> str:
        return self._shown(3)

    def _shown(self, digits: int) -> str:
        median, low, high = (f"{value:.{digits}f}" for value in (self.median, self.low, self.high))
        return f"{median} ({low} to {high})" if len(self.values) > 1 else median


def spread(results: Results, name: str, figure: str) -> Spread | None:
    """Return a figure of a case over the rounds; None without values."""
    values = [r[figure] for r in results.get(name, []) if r.get(figure) is not None]
    return Spread(values) if values else None


def ratio(results: Results, name: str, base: str, of: Callable[[dict[str, Any]], float]) -> Spread | None:
    """Return `of(case) / of(base)` for each round, in which both ran shortly after each other."""
    pairs = zip(results.get(name, []), results.get(base, []), strict=False)
    values = [of(mine) / of(theirs) for mine, theirs in pairs if "error" not in mine and "error" not in theirs]
    return Spread(values) if values else None


def rate(result: Mapping[str, Any]) -> float:
    """Return samples/s."""
    return float(result["samples_per_s"])


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines) + "\n"
