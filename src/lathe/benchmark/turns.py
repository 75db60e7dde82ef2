"""Sides that take turns in one process, and the files of their results."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from lathe.benchmark.spread import Results, Spread, ratio
from lathe.benchmark.written import write_files
from lathe.errors import UserError
from lathe.receipt.forms import reason

Facts = dict[str, dict[str, Any]]  # by side, what distinguishes it from the others
Claim = tuple[str, Spread | None, dict[str, float]]  # a sentence, the measured value, and `at_most` or `at_least`


class Suite(Protocol):
    """A module that measures sides."""

    def measure(self, request: dict[str, Any], output: Path, tell: Callable[[str], None]) -> tuple[Facts, Results]:
        """Return the facts of the sides, and the rounds of each."""

    def tables(self, facts: Facts, results: Results, request: Mapping[str, Any]) -> tuple[list[str], str]:
        """Return tables with the sentences below them, and a plot."""

    def claims(self, results: Results) -> list[Claim]:
        """Return the required ratios; None if not measured."""


def take_turns(sides: Mapping[str, Callable[[], dict[str, Any]]], rounds: int, tell: Callable[[str], None]) -> Results:
    """Run the sides in turns and return their results, round by round.

    Each round begins with another side, so that none always follows the same one. A side that fails gets `error` and no
    further turn.
    """
    names, results = list(sides), {name: list[dict[str, Any]]() for name in sides}
    for number in range(rounds):
        start = number % len(names)
        for name in [*names[start:], *names[:start]]:
            if any("error" in result for result in results[name]):
                continue
            try:
                results[name].append(sides[name]())
            except Exception as error:  # one failing side, such as without a compiler, must not hide the others
                results[name].append({"error": reason(error)})
                tell(f"{name}: {results[name][-1]['error']}")
        tell(f"round {number + 1} of {rounds}")
    return results


def failure(results: Results, name: str) -> str:
    """Return the reason why a side has no figures."""
    return next((r["error"] for r in results.get(name, []) if "error" in r), "not measured")


def fastest(results: Results, names: list[str], figure: str) -> str | None:
    """Return the side with the highest median of `figure`; None if none was measured."""
    found = {
        name: Spread([r[figure] for r in results[name] if figure in r]).median
        for name in names
        if any(figure in r for r in results.get(name, []))
    }
    return max(found, key=lambda name: found[name]) if found else None


def over(results: Results, name: str, base: str | None, figure: str) -> Spread | None:
    """Return a side's figure over its base's, round by round."""
    return None if base is None else ratio(results, name, base, lambda result: float(result[figure]))


def write(
    output: Path,
    facts: Facts,
    results: Results,
    suite: Suite,
    request: dict[str, Any],
    seconds: float,
    tell: Callable[[str], None],
) -> str:
    """Print the tables, and write results.json, results.md and plot.svg into `output`; return the tables."""
    if all("error" in result for rounds in results.values() for result in rounds):
        raise UserError(
            f"suite={request['suite']}: no side could be measured ({failure(results, next(iter(results)))})."
        )
    texts, drawing = suite.tables(facts, results, request)
    cases = [{"name": name, **facts[name], "rounds": rounds} for name, rounds in results.items()]
    text = write_files(output, texts, drawing, cases, request, seconds, threads="thread(s)", turns="")
    tell(f"\n{text}\nWritten to {output}")
    return text
