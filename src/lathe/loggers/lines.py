"""Read metrics.csv."""

import codecs
import csv
import io
from dataclasses import dataclass, field
from pathlib import Path

from lathe.errors import UserError
from lathe.files import open_plain


@dataclass
class Lines:
    """The `text` of a metrics.csv and its `rows` by column; all empty if the file is missing or empty."""

    text: str = ""
    columns: list[str] = field(default_factory=list)
    rows: list[dict[str, str]] = field(default_factory=list)


def read_lines(path: Path) -> Lines:
    """Read a metrics.csv, without a truncated last line, trailing null bytes and a byte order mark.

    Raises:
        UserError: the text is not UTF-8 or not CSV, or a line has no step.
        NotPlain: `path` is not a plain file.
    """
    try:
        with open_plain(path, "rb") as file:
            data = file.read().rstrip(b"\0")
    except FileNotFoundError:
        return Lines()
    data = data[: data.rfind(b"\n") + 1].removeprefix(codecs.BOM_UTF8)
    try:
        text = data.decode()
        reader = csv.DictReader(io.StringIO(text, newline=""), restval="")
        rows = list(reader)
        for row in rows:
            int(row["step"])
    except (UnicodeDecodeError, csv.Error, KeyError, ValueError) as error:
        raise UserError(f"{path} can't be read ({error}): mend that line, or move the file away.") from error
    return Lines(text, list(reader.fieldnames or []), rows)


def numbers(path: Path, lines: Lines) -> list[dict[str, float]]:
    """Return the rows of `lines`, read from `path`, as numbers, without metrics that a step did not log."""
    found: list[dict[str, float]] = []
    for row in lines.rows:
        try:
            found.append({name: float(value) for name, value in row.items() if value} | {"step": int(row["step"])})
        except ValueError as error:
            raise UserError(f"{path}: a value at step {row['step']} is not a number ({error}).") from error
    return found
