"""A report as LaTeX: a table for each metric, for \\usepackage{booktabs}, ready to be taken in with \\input."""

from collections.abc import Sequence

from lathe.verbs.report.assemble import Report
from lathe.verbs.report.markdown import better, found
from lathe.verbs.report.tables import readable, remarks

_MARKS = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    **{mark: f"\\{mark}" for mark in "&%$#_{}"},
}


def latex(report: Report) -> str:
    """A table for each metric; the command of each row stands behind it as a comment."""
    head = ["% \\usepackage{booktabs}", f"% {_comment(found(report))}"]
    head += [f"% {_comment(mark)}" for mark in report.marks]
    return "\n".join([*head, *("\n" + _metric(report, metric) for metric in report.metrics)]) + "\n"


def escaped(text: str) -> str:
    """Words as LaTeX prints them."""
    return "".join(_MARKS.get(letter, letter) for letter in text).replace("±", r"$\pm$")


def _metric(report: Report, metric: str) -> str:
    header, cells = readable(report, metric)
    words = len(report.factors)
    lines = [
        r"\begin{table}",
        r"  \centering",
        f"  \\caption{{{escaped(metric)}, {better(report, metric)}}}",
        f"  \\begin{{tabular}}{{{'l' * words}{'r' * (len(header) - words)}}}",
        r"    \toprule",
        f"    {_line(header)}",
        r"    \midrule",
    ]
    for group, line in zip(report.groups, cells, strict=True):
        lines += [f"    {_line(line)}", *(f"    % {_comment(command)}" for command in group.commands)]
    lines += [r"    \bottomrule", r"  \end{tabular}", r"\end{table}"]
    return "\n".join([*lines, *(f"% {_comment(line)}" for line in remarks(report, metric))])


def _line(cells: Sequence[str]) -> str:
    return f"{' & '.join(map(_cell, cells))} \\\\"


def _cell(text: str) -> str:
    """A cell that begins with a bracket would be read as an argument of the line's end before it."""
    return f"{{{escaped(text)}}}" if text.startswith(("[", "*")) else escaped(text)


def _comment(text: str) -> str:
    return " ".join(text.split())
