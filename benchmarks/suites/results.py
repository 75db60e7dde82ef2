"""Statistics over rounds, Markdown tables, and the files that a suite writes."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from lathe.errors import require
from lathe.files import write_atomically
from lathe.runs.rundir import describe_environment

MIB = 2**20
Facts = Mapping[str, Mapping[str, Any]]  # by case, what distinguishes it from the others
Columns = dict[str, Callable[[str], str]]  # by heading, the cell of a case
Figure = str | Callable[[Mapping[str, Any]], float]  # a key of a round's result, or a function of it


class Spread:
    """The values of several rounds; a format such as `.2f` shows the median, and the range if there are several."""

    def __init__(self, values: Sequence[float]) -> None:
        self.values = list(values)
        self.median, self.low, self.high = median(values), min(values), max(values)

    def __format__(self, spec: str) -> str:
        middle, low, high = (format(value, spec or ".3f") for value in (self.median, self.low, self.high))
        return f"{middle} ({low} to {high})" if len(self.values) > 1 else middle

    def __str__(self) -> str:
        return format(self)


class Results(dict[str, list[dict[str, Any]]]):
    """By case, the result of each round: its figures, or `error` with the reason why it has none."""

    def spread(self, name: str, figure: Figure) -> Spread | None:
        """Return a figure of a case over the rounds; None without values."""
        values = [value for result in self.get(name, []) if (value := _value(result, figure)) is not None]
        return Spread(values) if values else None

    def ratio(self, name: str, base: str | None, figure: Figure) -> Spread | None:
        """Return a case's figure over its base's within each round, in which both ran shortly after each other."""
        pairs = zip(self.get(name, []), self.get(base or "", []), strict=False)
        values = [(_value(mine, figure), _value(theirs, figure)) for mine, theirs in pairs]
        shares = [mine / theirs for mine, theirs in values if mine is not None and theirs]
        return Spread(shares) if shares else None

    def error(self, name: str) -> str | None:
        """Return the reason why a case has no figures; None if it has some."""
        rounds = self.get(name, [])
        return next((r["error"] for r in rounds if "error" in r), None if rounds else "not measured")

    def medians(self, label: str, figure: Figure) -> dict[str, dict[str, float]]:
        """Return the columns of a bar chart: the median of a figure of each case that has it."""
        found = {name: self.spread(name, figure) for name in self}
        return {name: {label: spread.median} for name, spread in found.items() if spread}

    def table(self, columns: Columns, facts: int = 1) -> str:
        """Return a table with a row for each case.

        `columns` are functions of the case's name by heading. The first ones, `facts` in number, are shown also for a
        case without figures, followed by its error.
        """
        rows = []
        for name in self:
            error, cells = self.error(name), [*columns.values()]
            first = [cell(name) for cell in cells[:facts]]
            others = (
                [cell(name) for cell in cells[facts:]] if error is None else [error, *[""] * (len(cells) - facts - 1)]
            )
            rows.append([*first, *others])
        return table([*columns], rows)


def _value(result: Mapping[str, Any], figure: Figure) -> float | None:
    if "error" in result:
        return None
    return figure(result) if callable(figure) else result.get(figure)


def fact(facts: Facts, key: str) -> Callable[[str], str]:
    """Return the cell of a column of facts."""
    return lambda name: str(facts[name][key])


def full(spread: Spread | None, spec: str = ".3f") -> str:
    """Return the median and the range; nothing for None."""
    return "" if spread is None else f"{spread:{spec}}"


def middle(spread: Spread | None, spec: str) -> str:
    """Return the median without the range; nothing for None."""
    return "" if spread is None else f"{spread.median:{spec}}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines) + "\n"


def write(
    output: Path,
    texts: Sequence[str],
    drawing: str,
    facts: Facts,
    results: Results,
    request: Mapping[str, Any],
    seconds: float,
) -> str:
    """Print `texts`, and write results.md, results.json and plot.svg into `output`; return what was printed.

    Raises:
        UserError: no case has figures.
    """
    errors = [results.error(name) for name in results]
    require(None in errors, f"suite={request['suite']}: nothing could be measured ({errors[0]}).")
    environment = {key: value for key, value in describe_environment().items() if key != "git_diff"}
    packages = ", ".join(f"{name} {version}" for name, version in environment["packages"].items())
    under = (
        f"{environment['cpu']}, {environment['cores']} cores, threads={request['threads']}; Python "
        f"{environment['python']}, {packages}. Medians (lowest to highest) of n = {request['rounds']} rounds in turns"
        f"{f', steps={steps}' if (steps := request.get('steps')) else ''}; ratios are taken round by round. "
        f"{seconds:.0f} s.\n"
    )
    text = "\n".join([*texts, under])
    cases = [{"name": name, **facts[name], "rounds": rounds} for name, rounds in results.items()]
    written = {"request": request, "environment": environment, "cases": cases}
    output.mkdir(parents=True, exist_ok=True)
    write_atomically(output / "results.md", text)
    write_atomically(output / "plot.svg", drawing)
    write_atomically(output / "results.json", json.dumps(written, indent=2) + "\n")
    print(f"\n{text}\nWritten to {output}", flush=True)
    return text
