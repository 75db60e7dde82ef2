"""Print a report on the terminal."""

import os
from collections.abc import Iterable, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lathe.verbs.report.assemble import Report
from lathe.verbs.report.markdown import better, found
from lathe.verbs.report.marks import left_out
from lathe.verbs.report.tables import columns, remarks

WIDE = 200  # characters
MOST = 30  # rows of a table; lists have half as many lines


def show(report: Report, console: Console | None = None) -> None:
    """Print the tables, remarks, caveats and commands."""
    console = console or terminal()
    _say(console, found(report))
    for metric in report.metrics:
        shown = columns(report, metric)
        cells = list(zip(*(column.cells for column in shown), strict=True))
        kept = _best(report, metric)
        table = Table(title=Text(f"{metric}, {better(report, metric)}"), title_justify="left", box=SIMPLE_HEAD)
        for column in shown:
            table.add_column(Text(column.title), justify="right" if column.number else "left", overflow="fold")
        for at in kept:
            table.add_row(*map(Text, cells[at]))
        console.print(table)
        if len(kept) < len(cells):
            _say(console, f"The best {len(kept)} of {len(cells)} rows; the files have all.")
        _some(console, "", list(remarks(report, metric, kept)))
    _some(console, "Note: ", report.marks)
    _some(console, "Not in the tables: ", left_out(report.runs, report.waiting))
    again = [report.groups[at] for at in _best(report, report.metrics[0])]
    _some(
        console, "", [f"{group.label}:  {command}" for group in again for command in group.commands], "Each row again:"
    )


def terminal() -> Console:
    """Return the console; a file or a pipe gets the width of the tables."""
    console = Console()
    return console if console.is_terminal or "COLUMNS" in os.environ else Console(width=WIDE)


def _best(report: Report, metric: str) -> list[int]:
    """Return the rows that are shown, in order."""
    if len(report.listed) <= MOST:
        return list(range(len(report.listed)))
    sign = -1 if report.directions[metric] == "max" else 1
    means = {at: group.summary(metric, report.how).mean for at, group in enumerate(report.listed)}
    ranked = sorted(means, key=lambda at: (means[at] is None, sign * (means[at] or 0.0)))
    fits = report.baseline in ranked[:MOST]
    return sorted(ranked[:MOST] if fits else [*ranked[: MOST - 1], report.baseline])


def _some(console: Console, before: str, lines: Sequence[str], title: str | None = None) -> None:
    if lines and title:
        _say(console, title)
    for line in lines[: MOST // 2]:
        _say(console, f"{before}{line}" if before else f"  {line}")
    if len(lines) > MOST // 2:
        _say(console, f"  and {len(lines) - MOST // 2} more, in the files")


def tell_files(paths: Iterable[str], console: Console | None = None) -> None:
    """Print the paths of the report's files."""
    listed = ", ".join(paths)
    if listed:
        _say(console or terminal(), f"Written: {listed}")


def _say(console: Console, text: str) -> None:
    console.print(text, soft_wrap=True, highlight=False, markup=False)  # not wrapped, so that it can be copied
