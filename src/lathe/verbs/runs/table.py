"""Rows of runs as text for a terminal, and as CSV or JSON for everything else."""

import json
import shutil
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lathe import files
from lathe.errors import require
from lathe.runs.cells import csv_text
from lathe.runs.state import STATES
from lathe.verbs.runs.listed import Listed

UNITS = ("B", "kB", "MB", "GB", "TB")
NAMED = 5  # runs that can't be read and are told one by one
NUMBERS = ("seed", "steps", "size")  # columns that end at the right


def rows(runs: Sequence[Listed], columns: Sequence[str] | None) -> list[dict[str, Any]]:
    """What a list shows of each run: where it lies, its state, and so on; values as they are."""
    found = []
    for run in runs:
        row: dict[str, Any] = {"run": run.where, "name": run.name, "date": run.date, "state": run.state}
        if columns is None:
            row["metric"], row["objective"] = run.objective
        else:
            row |= {key: run.value(key) for key in columns}
        row |= {"steps": run.steps, "seed": run.seed, "tags": run.tags, "size": run.size, "typed": run.typed}
        found.append({**row, "sentence": run.standing.sentence})
    return found


def show(found: Sequence[dict[str, Any]], columns: Sequence[str] | None) -> str:
    """A line for each row. On a terminal what was typed is cut at its edge; elsewhere lines are as long as they are."""
    keys = ["run", "state", *(["metric", "objective"] if columns is None else columns), "steps", "seed", "tags", "size"]
    keys = [key for key in dict.fromkeys(keys) if key != "tags" or any(row["tags"] for row in found)]
    cells = [[cell(row, key) for key in keys] for row in found]
    widths = [max(map(len, column)) for column in zip(keys, *cells, strict=True)]
    right = [key in NUMBERS or any(_is_number(row[key]) for row in found) for key in keys]
    lines = []
    for line, typed in zip([keys, *cells], ["typed", *(cell(row, "typed") for row in found)], strict=True):
        parts = (
            text.rjust(width) if end else text.ljust(width)
            for text, width, end in zip(line, widths, right, strict=True)
        )
        lines.append(_cut("  ".join([*parts, typed]).rstrip()))
    return "\n".join(lines)


def summary(runs: Sequence[Listed], shown: int) -> str:
    """How many runs there are, by state, and what they weigh."""
    states = Counter(run.state for run in runs)
    parts = ", ".join(f"{states[state]} {state}" for state in STATES if states[state])
    last = "the last is shown" if shown == 1 else f"the last {shown} are shown"
    more = f"; {last}, limit=null shows all" if shown < len(runs) else ""
    jobs = sum(run.path is None for run in runs)
    none = f" {jobs} of them {'is a job' if jobs == 1 else 'are jobs'} without a run directory." if jobs else ""
    return f"{many(len(runs), 'run')} ({parts}), {size(sum(run.size for run in runs))}{more}.{none}"


def unread(runs: Sequence[Listed]) -> str | None:
    """Which runs can't be read and why; None if all can."""
    said = [run.standing.unread.rstrip(".") for run in runs if run.standing.unread is not None]
    more = f"; and {len(said) - NAMED} more" if len(said) > NAMED else ""
    return printable(f"{many(len(said), 'run')} can't be read: {'; '.join(said[:NAMED])}{more}.") if said else None


def write(output: str, found: list[dict[str, Any]]) -> None:
    """Writes rows as .csv or .json."""
    path = check_output(output, (".csv", ".json"))
    place = files.followed(path)
    if path.suffix == ".json":
        files.write_atomically(place, json.dumps(found, indent=2) + "\n")
        return
    flat = [
        [" ".join(map(str, value)) if isinstance(value, list) else value for value in row.values()] for row in found
    ]
    files.write_atomically(place, csv_text(list(found[0]) if found else ["run"], flat))


def check_output(output: str, suffixes: Sequence[str]) -> Path:
    """The file that `output` names.

    Raises:
        UserError: it is of another kind, or its folder is not there.
    """
    path = Path(output)
    require(path.suffix in suffixes, f"output={output}: name a file that ends in {' or '.join(suffixes)}.")
    require(path.resolve().parent.is_dir(), f"output={output}: its folder does not exist.")
    require(not path.is_dir(), f"output={output} is a folder: name a file.")
    return path


def cell(row: dict[str, Any], key: str) -> str:
    """A value as it may stand on a terminal: one line, without anything that would command it."""
    value = row[key]
    if key == "size":
        return size(value)
    if isinstance(value, float):
        return f"{value:.6g}"
    joined = (" " if key == "typed" else ",").join(map(str, value)) if isinstance(value, list) else value
    return printable("" if value is None else str(joined))


def printable(text: str) -> str:
    """`text` without characters that a terminal would obey."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def size(count: float) -> str:
    """Bytes in words, by thousands."""
    power = next((power for power in range(len(UNITS) - 1) if count < 1000 ** (power + 1)), len(UNITS) - 1)
    scaled = count / 1000**power
    return f"{scaled:.0f} {UNITS[power]}" if power == 0 or scaled >= 100 else f"{scaled:.1f} {UNITS[power]}"


def many(count: int, noun: str) -> str:
    """A number of things."""
    return f"{count} {noun}{'s' * (count != 1)}"


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _cut(line: str) -> str:
    if not sys.stdout.isatty():
        return line
    width = shutil.get_terminal_size().columns
    return line if len(line) <= width else f"{line[: width - 3]}..."
