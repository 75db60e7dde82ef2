"""A report as Markdown: tables, remarks and commands."""

import re
from collections.abc import Iterator, Sequence

from lathe.verbs.report.assemble import Report
from lathe.verbs.report.marks import counts, left_out
from lathe.verbs.report.tables import columns, remarks
from lathe.verbs.runs.table import many


def markdown(report: Report) -> str:
    """Return the whole report as one page."""
    parts = [f"# {_text(report.title)}", found(report), *_list(report.marks)]
    for metric in report.metrics:
        kept = columns(report, metric)
        cells = list(zip(*(column.cells for column in kept), strict=True))
        parts += [f"## {_text(metric)}, {better(report, metric)}", _table([column.title for column in kept], cells)]
        parts += _list(remarks(report, metric))
    parts += ["## The runs of each row again", "\n".join(_commands(report))]
    lost = left_out(report.runs, report.waiting)
    if lost:
        parts += ["## Not in the tables", *_list(lost)]
    return "\n\n".join(parts) + "\n"


def found(report: Report) -> str:
    """Describe the number of runs in each state, and the intervals."""
    states = ", ".join(f"{count} {state}" for state, count in counts(report.runs).items() if count)
    kind = "Student's t" if report.how.kind == "t" else "bootstrap percentiles"
    over = f"{len(report.groups)} groups over seeds and folds" if len(report.groups) > 1 else "one group"
    without = len(report.groups) - len(report.listed)
    over += f", {without} of them without a complete run and so without a row" if without else ""
    baseline = f"; differences are from {report.groups[report.baseline].label}" if len(report.groups) > 1 else ""
    return (
        f"{many(len(report.runs), 'run')} ({states}) in {over}; intervals of {report.how.percent} by {kind}{baseline}."
    )


def better(report: Report, metric: str) -> str:
    """Describe the direction of a metric."""
    return "higher is better" if report.directions[metric] == "max" else "lower is better"


def _commands(report: Report) -> Iterator[str]:
    for group in report.listed:
        for command in group.commands:
            fence = "`" * (1 + max(map(len, re.findall("`+", command)), default=0))
            yield f"- {_text(group.label)}: {fence}{command}{fence}"


def _list(lines: Sequence[str] | Iterator[str]) -> list[str]:
    text = "\n".join(f"- {_text(line)}" for line in lines)
    return [text] if text else []


def _text(text: str) -> str:
    """Escape text for Markdown."""
    for mark in "\\`*_<>[]|":
        text = text.replace(mark, f"\\{mark}")
    return text


def _table(header: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    lines = [[_text(cell) for cell in line] for line in (header, *cells)]
    lines.insert(1, ["---"] * len(header))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
