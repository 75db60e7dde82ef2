"""A report as LaTeX: a table for each metric, for \\usepackage{booktabs} and \\input."""

import re
from collections.abc import Sequence

from lathe.verbs.report.assemble import Report
from lathe.verbs.report.markdown import better, found
from lathe.verbs.report.tables import Column, columns, remarks, rows

_MARKS = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    **{mark: f"\\{mark}" for mark in "&%$#_{}"},
}


def latex(report: Report) -> str:
    """Return a table for each metric, with the command of each row as a comment."""
    head = ["% \\usepackage{booktabs}", f"% {_comment(found(report))}"]
    head += [f"% {_comment(mark)}" for mark in report.marks]
    return "\n".join([*head, *("\n" + _metric(report, metric) for metric in report.metrics)]) + "\n"


def escaped(text: str) -> str:
    """Escape text for LaTeX."""
    return "".join(_MARKS.get(letter, letter) for letter in text).replace("±", r"$\pm$")


def _metric(report: Report, metric: str) -> str:
    kept = columns(report, metric)
    bold = _bold(report, metric)
    lines = [
        r"\begin{table}",
        r"  \centering",
        f"  \\caption{{{escaped(metric)}, {better(report, metric)}}}",
        f"  \\label{{tab:{re.sub('[^A-Za-z0-9]+', '-', metric).strip('-').lower()}}}",
        f"  \\begin{{tabular}}{{{''.join('r' if column.number else 'l' for column in kept)}}}",
        r"    \toprule",
        f"    {_line([_cell(column.title) for column in kept])}",
        r"    \midrule",
    ]
    for at, group in enumerate(report.listed):
        cells = [_value(column, column.cells[at], at in bold) for column in kept]
        lines += [f"    {_line(cells)}", *(f"    % {_comment(command)}" for command in group.commands)]
    lines += [r"    \bottomrule", r"  \end{tabular}", r"\end{table}"]
    return "\n".join([*lines, *(f"% {_comment(line)}" for line in remarks(report, metric))])


def _bold(report: Report, metric: str) -> set[int]:
    """Return the rows with the best mean."""
    means = {at: row.told.mean for at, row in enumerate(rows(report, metric)) if row.told.mean is not None}
    if len(means) < 2:
        return set()
    best = (max if report.directions[metric] == "max" else min)(means.values())
    return {at for at, mean in means.items() if mean == best}


def _line(cells: Sequence[str]) -> str:
    return f"{' & '.join(cells)} \\\\"


def _value(column: Column, text: str, bold: bool) -> str:
    if not column.number:
        return _cell(text)
    mean, plus_minus, std = text.partition(" ± ")
    if bold and column.name == "mean":
        return f"\\textbf{{{_number(mean)}}}{_number(plus_minus + std)}"
    return _number(text)


def _number(text: str) -> str:
    """Format a number with a math minus and powers; a hyphen is shorter than a minus."""
    text = re.sub(r"(\d)e([+-]?)0*(\d+)", lambda found: f"{found[1]}\0{found[2].strip('+')}{found[3]}\1", text)
    text = re.sub(r"(?<![\w\0])-(?=\d)", "\2", _cell(text))
    return text.replace("\2", "$-$").replace("\0", r"$\cdot 10^{").replace("\1", "}$")


def _cell(text: str) -> str:
    """Escape a cell; one that begins with a bracket would be an argument of the preceding line end."""
    return f"{{{escaped(text)}}}" if text.startswith(("[", "*")) else escaped(text)


def _comment(text: str) -> str:
    return " ".join(text.split())
