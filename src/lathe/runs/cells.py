"""CSV that a spreadsheet may open: its words are often somebody else's, and a cell can be a formula."""

import csv
import io
import re
from collections.abc import Iterable, Sequence
from typing import Any

# What spreadsheets take for a formula's beginning, at the start of a cell or behind a semicolon, which ends one where
# commas are decimal points; full-width letters too. After "CSV Injection" of OWASP.
_FORMULA = re.compile(r"(?:^|(?<=;))(?=\s*[=+\-@\uff1d\uff0b\uff0d\uff20])")
_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")


def cell(value: Any) -> Any:
    """A value as it may stand in a CSV file: one line of visible letters, and no formula. Numbers stay numbers."""
    if value is None or isinstance(value, (int, float)):
        return value
    text = str(value)
    return text if _NUMBER.fullmatch(text) else _FORMULA.sub("'", escaped(text))


def escaped(text: str) -> str:
    """`text` with what is not visible, such as ends of lines and marks that turn the direction of writing, as Python
    spells it."""
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def csv_text(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A whole CSV file of such cells."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([[cell(value) for value in row] for row in (head, *rows)])
    return text.getvalue()
