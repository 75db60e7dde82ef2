"""metrics.csv as a run has written it, whatever has become of the file since."""

import codecs
import csv
import io
import re
from dataclasses import dataclass, field
from pathlib import Path

from lathe.errors import UserError
from lathe.files import open_plain


@dataclass
class Lines:
    """`text` is what was read, `rows` its lines by column; all are empty where there is no file, or nothing in it."""

    text: str = ""
    columns: list[str] = field(default_factory=list)
    rows: list[dict[str, str]] = field(default_factory=list)


def read_lines(path: Path) -> Lines:
    """The lines of a metrics.csv. What a kill or a loss of power leaves at its end, a line that is cut or null bytes,
    is left out, as is a byte order mark.

    Raises:
        UserError: a run has not written it so; the sentence names the line.
        NotPlain: it is no plain file.
    """
    try:
        with open_plain(path, "rb") as file:
            data = file.read().rstrip(b"\0")
    except FileNotFoundError:
        return Lines()
    data = data[: data.rfind(b"\n") + 1].removeprefix(codecs.BOM_UTF8)
    odd = data.find(b"\0")
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise _refused(path, _line_at(data, error.start), "is no text in UTF-8") from error
    if odd >= 0:
        raise _refused(path, _line_at(data, odd), "has null bytes in it")
    lines, reader = Lines(text), csv.reader(io.StringIO(text, newline=""))  # a name may have a line's end in quotes
    try:
        for cells in filter(None, reader):
            wrong = _wrong_row(lines.columns, cells) if lines.columns else _wrong_head(cells)
            if wrong:
                raise _refused(path, reader.line_num, wrong)
            if lines.columns:
                lines.rows.append(dict.fromkeys(lines.columns, "") | dict(zip(lines.columns, cells, strict=False)))
            else:
                lines.columns = cells
    except csv.Error as error:
        raise _refused(path, reader.line_num, f"can't be read ({error})") from error
    return lines


def numbers(path: Path, lines: Lines) -> list[dict[str, float]]:
    """The rows of `lines`, which were read from `path`, without what a step has not logged. Raises UserError where a
    value is no number."""
    found: list[dict[str, float]] = []
    for row in lines.rows:
        try:
            found.append({name: float(value) for name, value in row.items() if value} | {"step": int(row["step"])})
        except ValueError as error:
            raise UserError(f"{path}: at step {row['step']} stands what is no number: mend or remove it.") from error
    return found


def _wrong_head(columns: list[str]) -> str:
    twice = next((name for at, name in enumerate(columns) if name in columns[:at]), None)
    if twice is not None:
        return f"names the column {twice[:80]!a} twice"
    return "" if "step" in columns else "names no column 'step'"


def _wrong_row(columns: list[str], cells: list[str]) -> str:
    if len(cells) > len(columns):
        return f"has {len(cells)} values for {len(columns)} columns"
    step = dict(zip(columns, cells, strict=False)).get("step", "")
    return "" if re.fullmatch(r"[0-9]{1,18}", step) else f"has {step[:40]!a} for a step"


def _line_at(data: bytes, place: int) -> int:
    return data.count(b"\n", 0, place) + 1


def _refused(path: Path, line: int, why: str) -> UserError:
    return UserError(
        f"{path}, line {line}, {why}: mend or remove that line, or move the file away, and the run goes on without its "
        "earlier lines."
    )
