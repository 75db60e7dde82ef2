"""Text of tables and messages about runs."""

from collections.abc import Sequence

UNITS = ("B", "kB", "MB", "GB", "TB")


def printable(text: str) -> str:
    """Replace unprintable characters, which could control a terminal or end a line."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def many(count: int, noun: str) -> str:
    """Return a count with its noun."""
    return f"{count} {noun}{'s' * (count != 1)}"


def size_text(count: float) -> str:
    """Format bytes with decimal units."""
    power = next((power for power in range(len(UNITS) - 1) if count < 1000 ** (power + 1)), len(UNITS) - 1)
    scaled = count / 1000**power
    return f"{scaled:.0f} {UNITS[power]}" if power == 0 or scaled >= 100 else f"{scaled:.1f} {UNITS[power]}"


def age_text(seconds: float) -> str:
    """Format a time in the largest unit that it holds twice."""
    for unit, length in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} seconds"


def table_lines(head: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[bool] | None = None) -> list[str]:
    """Return lines of columns that are as wide as their longest cell; those in `right` are aligned to the right."""
    cells = [[printable(cell) for cell in row] for row in (head, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    ends = right or [False] * len(widths)
    return [
        "  ".join(
            cell.rjust(width) if end else cell.ljust(width) for cell, width, end in zip(row, widths, ends, strict=True)
        ).rstrip()
        for row in cells
    ]
