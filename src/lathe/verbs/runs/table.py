"""Tables of runs, as text for a terminal and as CSV or JSON."""

import json
import shutil
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lathe import files
from lathe.config.override_parsing import key_of, short_names
from lathe.errors import require
from lathe.runs.metric_names import best_of
from lathe.runs.run_status import STATES
from lathe.verbs.runs.listed import Listed

UNITS = ("B", "kB", "MB", "GB", "TB")
NAMED = 5  # unreadable runs that are listed
NOT_SHOWN = (
    "name",
    "paths",
    "launch",
    "logger",
    "hydra",
    "resume",
    "seed",
    "tags",
)  # have a column, or don't change results
NUMBERS = ("seed", "steps", "size")  # right-aligned columns


def rows(runs: Sequence[Listed], columns: Sequence[str] | None) -> list[dict[str, Any]]:
    """Return the row of each run with unformatted values."""
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


def show(runs: Sequence[Listed], columns: Sequence[str] | None) -> str:
    """Return a line for each run: state, metric, and differing overrides or the requested `columns`.

    A star marks the best value.
    """
    found, differ = rows(runs, columns), differing(runs) if columns is None else {}
    for at, row in enumerate(found):
        row |= {key: values[at] for key, values in differ.items() if key not in row}
    keys = ["run", "state", *(["metric", "objective"] if columns is None else columns), *differ]
    keys = list(dict.fromkeys([*keys, "steps", "seed", "tags", "size"]))
    titles = {key: short for key, short in zip(keys, short_names(keys), strict=True) if key in differ}
    names = {row.get("metric") for row in found} - {"", None}
    best = None
    if len(names) == 1:
        titles["objective"] = name = str(*names)
        best = best_of([row["objective"] for row in found], name, next(run.result for run in runs if run.result))
    same = {
        "state": all(row["state"] == "complete" for row in found),
        "metric": len(names) == 1,
        "tags": not any(row["tags"] for row in found),
    }
    keys = [key for key in keys if not same.get(key)]
    cells = [[printable(titles.get(key, key)) for key in keys], *([cell(row, key) for key in keys] for row in found)]
    if best is not None:
        for at, line in enumerate(cells[1:]):
            line[keys.index("objective")] += " *" if at == best else "  "
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    right = [key in NUMBERS or any(_is_number(row[key]) for row in found) for key in keys]
    lines = []
    for line in cells:
        parts = (
            text.rjust(width) if end else text.ljust(width)
            for text, width, end in zip(line, widths, right, strict=True)
        )
        lines.append(_cut("  ".join(parts).rstrip()))
    return "\n".join(lines)


def differing(runs: Sequence[Listed]) -> dict[str, list[Any]]:
    """Return the values of each override that differs between runs, the most frequent first."""
    typed = Counter(key for run in runs for key in {key_of(word): None for word in run.typed} if _is_setting(key))
    values = {key: [run.value(key) for run in runs] for key, _ in typed.most_common()}
    return {key: some for key, some in values.items() if any(value != some[0] for value in some)}


def shared(runs: Sequence[Listed]) -> str | None:
    """Return the overrides that all runs have in common; None if there are none."""
    words = [word for word in runs[0].typed if _is_setting(word) and all(word in run.typed for run in runs)]
    return printable(f"Overrides of {'every' if len(runs) > 1 else 'this'} run: {' '.join(words)}") if words else None


def _is_setting(word: str) -> bool:
    return key_of(word).partition(".")[0] not in NOT_SHOWN


def summary(runs: Sequence[Listed], shown: int) -> str:
    """Return the number of runs by state, and their size."""
    states = Counter(run.state for run in runs)
    parts = ", ".join(f"{states[state]} {state}" for state in STATES if states[state])
    last = "the last is shown" if shown == 1 else f"the last {shown} are shown"
    more = f"; {last}, limit=null shows all" if shown < len(runs) else ""
    jobs = sum(run.path is None for run in runs)
    none = f" {jobs} of them {'is a job' if jobs == 1 else 'are jobs'} without a run directory." if jobs else ""
    return f"{many(len(runs), 'run')} ({parts}), {size(sum(run.size for run in runs))}{more}.{none}"


def unread(runs: Sequence[Listed]) -> str | None:
    """Return the message about unreadable runs; None if there are none."""
    said = [run.standing.unread.rstrip(".") for run in runs if run.standing.unread is not None]
    more = f"; and {len(said) - NAMED} more" if len(said) > NAMED else ""
    return printable(f"{many(len(said), 'run')} can't be read: {'; '.join(said[:NAMED])}{more}.") if said else None


def write(output: str, found: list[dict[str, Any]]) -> None:
    """Write rows as .csv or .json."""
    path = check_output(output, (".csv", ".json"))
    place = files.followed(path)
    if path.suffix == ".json":
        files.write_atomically(place, json.dumps(found, indent=2) + "\n")
        return
    flat = [
        [" ".join(map(str, value)) if isinstance(value, list) else value for value in row.values()] for row in found
    ]
    files.write_atomically(place, files.csv_text(list(found[0]) if found else ["run"], flat))


def check_output(output: str, suffixes: Sequence[str]) -> Path:
    """Return the path of `output`; raise UserError for another suffix or a missing folder."""
    path = Path(output)
    require(path.suffix in suffixes, f"output={output}: name a file that ends in {' or '.join(suffixes)}.")
    require(path.resolve().parent.is_dir(), f"output={output}: its folder does not exist.")
    require(not path.is_dir(), f"output={output} is a folder: name a file.")
    return path


def cell(row: dict[str, Any], key: str) -> str:
    """Return a value as one printable line."""
    value = row[key]
    if key == "size":
        return size(value)
    if isinstance(value, float):
        return f"{value:.6g}"
    joined = (" " if key == "typed" else ",").join(map(str, value)) if isinstance(value, list) else value
    return printable("" if value is None else str(joined))


def printable(text: str) -> str:
    """Replace unprintable characters, which could control a terminal."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def size(count: float) -> str:
    """Format bytes with decimal units."""
    power = next((power for power in range(len(UNITS) - 1) if count < 1000 ** (power + 1)), len(UNITS) - 1)
    scaled = count / 1000**power
    return f"{scaled:.0f} {UNITS[power]}" if power == 0 or scaled >= 100 else f"{scaled:.1f} {UNITS[power]}"


def many(count: int, noun: str) -> str:
    """Return a count with its noun."""
    return f"{count} {noun}{'s' * (count != 1)}"


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _cut(line: str) -> str:
    if not sys.stdout.isatty():
        return line
    width = shutil.get_terminal_size().columns
    return line if len(line) <= width else f"{line[: width - 3]}..."
