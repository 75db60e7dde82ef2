"""Sides that have their turns round by round in one process, and the files of what was measured."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from lathe.benchmark.spread import Results, Spread, ratio
from lathe.benchmark.written import write_files
from lathe.errors import UserError
from lathe.receipt.forms import reason

Facts = dict[str, dict[str, Any]]  # of each side, what tells it apart from others
Claim = tuple[str, Spread | None, dict[str, float]]  # a sentence, what was measured, and `at_most` or `at_least`


class Suite(Protocol):
    """A module that measures."""

    def measure(self, request: dict[str, Any], output: Path, tell: Callable[[str], None]) -> tuple[Facts, Results]:
        """What tells the sides apart, and the rounds of each."""

    def tables(self, facts: Facts, results: Results, request: Mapping[str, Any]) -> tuple[list[str], str]:
        """Tables and the sentences below them, and a plot."""

    def claims(self, results: Results) -> list[Claim]:
        """What is promised of ratios; None where they were not measured."""


def take_turns(sides: Mapping[str, Callable[[], dict[str, Any]]], rounds: int, tell: Callable[[str], None]) -> Results:
    """What each side returns, round by round; each round begins with another side, so that none always follows the
    same. A side that fails has `error` with what went wrong, and no further turn.
    """
    names, results = list(sides), {name: list[dict[str, Any]]() for name in sides}
    for number in range(rounds):
        start = number % len(names)
        for name in [*names[start:], *names[:start]]:
            if any("error" in result for result in results[name]):
                continue
            try:
                results[name].append(sides[name]())
            except Exception as error:  # one side that fails, for want of a compiler say, must not hide the others
                results[name].append({"error": reason(error)})
                tell(f"{name}: {results[name][-1]['error']}")
        tell(f"round {number + 1} of {rounds}")
    return results


def failure(results: Results, name: str) -> str:
    """Why a side has no figures."""
    return next((r["error"] for r in results.get(name, []) if "error" in r), "not measured")


def fastest(results: Results, names: list[str], figure: str) -> str | None:
    """The side with the highest median of `figure`; None where none was measured."""
    found = {
        name: Spread([r[figure] for r in results[name] if figure in r]).median
        for name in names
        if any(figure in r for r in results.get(name, []))
    }
    return max(found, key=lambda name: found[name]) if found else None


def over(results: Results, name: str, base: str | None, figure: str) -> Spread | None:
    """A side's figure over that of its base, round by round."""
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
    """Prints the tables and writes results.json, results.md and plot.svg into `output`; returns the tables.

    Raises:
        UserError: no side could be measured.
    """
    if all("error" in result for rounds in results.values() for result in rounds):
        raise UserError(
            f"suite={request['suite']}: no side could be measured ({failure(results, next(iter(results)))})."
        )
    texts, drawing = suite.tables(facts, results, request)
    cases = [{"name": name, **facts[name], "rounds": rounds} for name, rounds in results.items()]
    text = write_files(output, texts, drawing, cases, request, seconds, threads="thread(s)", turns="")
    tell(f"\n{text}\nWritten to {output}")
    return text
