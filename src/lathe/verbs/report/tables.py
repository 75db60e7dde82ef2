"""A report as tables, and these as CSV, Markdown, LaTeX, and on the terminal."""

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lathe.config.metric_names import COSTS, cost_of
from lathe.files import csv_text
from lathe.verbs.report.assemble import COLUMNS, Report, available, counts, left_out
from lathe.verbs.report.groups import Group, Pair, titles
from lathe.verbs.runs.reader import many

WIDE = 200  # characters of a file or a pipe
MOST = 30  # rows of a table on the terminal; lists have half as many lines
LATEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    **{mark: f"\\{mark}" for mark in "&%$#_{}"},
}
ALONE = "n = 1: no interval"  # for single runs reported once


@dataclass(frozen=True)
class Cell:
    """A cell of a table: its text and its numbers for CSV; `name` as in the key `columns`. The `best` mean is bold."""

    name: str
    title: str
    text: str
    csv: dict[str, Any]
    number: bool = True
    best: bool = False


@dataclass(frozen=True)
class Row:
    """A group under one metric, with all its cells; `remarks` are its caveats and what its difference says."""

    group: Group
    cells: list[Cell]
    remarks: list[str]


def rows(report: Report, metric: str) -> list[Row]:
    """Return a row for each listed group, in order."""
    pairs, result = {pair.a: pair for pair in report.pairs[metric]}, []
    means = [mean for group in report.listed if (mean := group.mean_of(metric)) is not None]
    best = (max if report.directions[metric] == "max" else min)(means) if len(means) > 1 else None
    for at, group in enumerate(report.listed):
        caveat, pair = group.summary(metric, report.how).why, pairs.get(at)
        remarks = [caveat or "", pair.says if pair else "", *group.marks]
        is_best = best is not None and group.mean_of(metric) == best
        result.append(Row(group, list(_cells(report, metric, group, pair, is_best)), list(filter(None, remarks))))
    return result


def _cells(report: Report, metric: str, group: Group, pair: Pair | None, is_best: bool) -> Iterator[Cell]:
    for key, title in zip(report.factors, titles(report.factors), strict=True):
        yield Cell(key, title, group.texts[key], {key: group.texts[key]}, number=False)
    summary = group.summary(metric, report.how)
    yield Cell("n", "n", str(summary.n), {"n": summary.n})
    mean = number(summary.mean) + ("" if summary.std is None else f" ± {number(summary.std)}")
    yield Cell("mean", "mean ± std", mean, {"mean": summary.mean, "std": summary.std}, best=is_best)
    low, high = summary.interval or (None, None)
    yield Cell("interval", f"{report.how.percent} interval", span(summary.interval), {"low": low, "high": high})
    best = group.best(metric, report.directions[metric])
    yield Cell("best", "best", number(best), {"best": best})
    n, gap, interval = (pair.test.n, pair.test.difference, pair.test.interval) if pair else (None, None, None)
    text = "baseline" if pair is None and len(report.listed) > 1 else ("+" if (gap or 0) > 0 else "") + number(gap)
    yield Cell("difference", "difference", text, {"pairs": n, "difference": gap})
    low, high = interval or (None, None)
    yield Cell("difference_interval", "its interval", span(interval), {"difference_low": low, "difference_high": high})
    tests = {"p": "p", "p_holm": "p (Holm)", "p_bh": "p (BH)"}
    for name, title in tests.items():
        p = getattr(pair.test, name) if pair else None
        yield Cell(name, title, "" if p is None else f"{p:.2g}", {name: p})
    costs = {"steps": group.steps, "seconds": group.mean_of("seconds"), "parameters": group.mean_of("parameters")}
    for name, value in (costs | group.cost).items():
        title = {"macs": "MACs", "latency_ms": "latency (ms)"}.get(name, name)
        text = number(value)
        if value is not None and name in ("seconds", "latency_ms"):
            text = f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
        yield Cell(name, title, text, {name: value})


def table(report: Report, metric: str) -> list[list[Cell]]:
    """Return the rows with the requested columns in that order; by default with all that are informative."""
    columns = list(zip(*(row.cells for row in rows(report, metric)), strict=True))
    if report.columns is not None:
        named = {column[0].name: column for column in columns}
        named |= dict(zip(titles(report.factors), columns, strict=False))
        columns = [named[name] for name in report.columns]
    else:
        redundant = {"best"} if report.single else set()
        redundant |= {"p_holm", "p_bh"} if sum(pair.test.p is not None for pair in report.pairs[metric]) < 2 else set()
        redundant |= {"steps"} if len({group.steps for group in report.listed}) == 1 else set()
        columns = [
            column
            for column in columns
            if not column[0].number or (column[0].name not in redundant and any(cell.text for cell in column))
        ]
    return list(map(list, zip(*columns, strict=True)))


def number(value: float | None) -> str:
    """Format a number with four decimals, fewer if it is large."""
    if value is None:
        return ""
    if float(value).is_integer() and abs(value) < 1e15:
        return f"{value:,.0f}"
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4f}" if abs(value) >= 1e-3 else f"{value:.3g}"


def span(interval: Sequence[float] | None) -> str:
    return "" if interval is None else f"[{number(interval[0])}, {number(interval[1])}]"


def remarks(report: Report, metric: str, indices: Sequence[int] | None = None) -> Iterator[str]:
    """Yield a line for each row that has remarks, of all rows or of those at `indices`."""
    all_rows = rows(report, metric)
    for row in all_rows if indices is None else [all_rows[at] for at in indices]:
        texts = [remark for remark in dict.fromkeys(row.remarks) if not (report.single and remark == ALONE)]
        if texts:
            yield f"{row.group.label}: {'; '.join(texts)}"


def groups_csv(report: Report) -> str:
    """Return a CSV line for each metric and group, with unrounded numbers."""
    lines = []
    for metric in report.metrics:
        for row in rows(report, metric):
            named = {cell.name: cell.csv for cell in row.cells}
            named |= {short: named[key] for short, key in zip(titles(report.factors), report.factors, strict=True)}
            line = {"metric": metric, "better": report.directions[metric]}
            for name in report.columns or [*report.factors, *COLUMNS]:
                line |= named[name]
            lines.append(line | {"remarks": "; ".join(row.remarks), "command": row.group.command})
    return csv_text(list(lines[0]), [list(line.values()) for line in lines])


def runs_csv(report: Report) -> str:
    """Return a CSV line for each run in any state, with all its metrics."""
    groups = {id(run): group.label for group in report.groups for run in group.runs}
    names = available(report.runs)
    head = ["run", "state", "group", "seed", "fold", *names, *COSTS, "sentence", "command"]
    lines = []
    for run in report.runs:
        numbers = [*map(run.metrics.get, names), *cost_of(run.receipt).values()]
        about = [run.where, run.state, groups.get(id(run)), run.seed, run.fold]
        lines.append([*about, *numbers, run.sentence, run.command()])
    return csv_text(head, lines)


def headline(report: Report) -> str:
    """Describe the number of runs in each state, and the intervals."""
    states = ", ".join(f"{count} {state}" for state, count in counts(report.runs).items() if count)
    kind = "Student's t" if report.how.kind == "t" else "bootstrap percentiles"
    over, baseline = "one group", ""
    if len(report.groups) > 1:
        over = f"{len(report.groups)} groups over seeds and folds"
        baseline = f"; differences are from {report.groups[report.baseline].label}"
    without = len(report.groups) - len(report.listed)
    over += f", {without} of them without a complete run and so without a row" if without else ""
    return (
        f"{many(len(report.runs), 'run')} ({states}) in {over}; intervals of {report.how.percent} by {kind}{baseline}."
    )


def better(report: Report, metric: str) -> str:
    return "higher is better" if report.directions[metric] == "max" else "lower is better"


def markdown(report: Report) -> str:
    """Return the whole report as one page."""
    parts = [f"# {_escaped(report.title)}", headline(report), *_bullets(report.marks)]
    for metric in report.metrics:
        rows = table(report, metric)
        lines = [[_escaped(cell.title) for cell in rows[0]], ["---"] * len(rows[0])]
        for row in rows:
            lines.append([f"**{_escaped(cell.text)}**" if cell.best else _escaped(cell.text) for cell in row])
        parts += [f"## {_escaped(metric)}, {better(report, metric)}"]
        parts += ["\n".join(f"| {' | '.join(line)} |" for line in lines), *_bullets(remarks(report, metric))]
    commands = []
    for group in report.listed:
        for command in group.commands:
            fence = "`" * (1 + max(map(len, re.findall("`+", command)), default=0))
            commands.append(f"- {_escaped(group.label)}: {fence}{command}{fence}")
    parts += ["## The runs of each row again", "\n".join(commands)] if commands else []
    lost = left_out(report.runs, report.waiting)
    return "\n\n".join([*parts, *(["## Not in the tables", *_bullets(lost)] if lost else [])]) + "\n"


def _bullets(lines: Iterable[str]) -> list[str]:
    text = "\n".join(f"- {_escaped(line)}" for line in lines)
    return [text] if text else []


def _escaped(text: str) -> str:
    return re.sub(r"([\\`*_<>\[\]|])", r"\\\1", text)


def latex(report: Report) -> str:
    r"""Return a table for each metric, for \usepackage{booktabs} and \input; commands are comments."""
    parts = ["% \\usepackage{booktabs}", *map(_comment, [headline(report), *report.marks])]
    for metric in report.metrics:
        rows = table(report, metric)
        parts += [
            "",
            r"\begin{table}",
            r"  \centering",
            f"  \\caption{{{latex_text(metric)}, {better(report, metric)}}}",
            f"  \\label{{tab:{re.sub('[^A-Za-z0-9]+', '-', metric).strip('-').lower()}}}",
            f"  \\begin{{tabular}}{{{''.join('r' if cell.number else 'l' for cell in rows[0])}}}",
            r"    \toprule",
            f"    {' & '.join(_cell(cell.title) for cell in rows[0])} \\\\",
            r"    \midrule",
        ]
        for row, group in zip(rows, report.listed, strict=True):
            parts.append(f"    {' & '.join(map(_value, row))} \\\\")
            parts += [f"    {_comment(command)}" for command in group.commands]
        parts += [r"    \bottomrule", r"  \end{tabular}", r"\end{table}", *map(_comment, remarks(report, metric))]
    return "\n".join(parts) + "\n"


def latex_text(text: str) -> str:
    return "".join(LATEX.get(letter, letter) for letter in text).replace("±", r"$\pm$")


def _cell(text: str) -> str:
    """Escape a cell; one that begins with a bracket would be an argument of the preceding line end."""
    return f"{{{latex_text(text)}}}" if text.startswith(("[", "*")) else latex_text(text)


def _value(cell: Cell) -> str:
    """Return a cell, a number with a math minus and powers; the best mean is bold."""
    text = _cell(cell.text)
    if not cell.number:
        return text
    text = re.sub(r"(?<![\w.])-(?=\d)", "$-$", text)
    text = re.sub(r"(\d)e([+-]?)0*(\d+)", lambda e: f"{e[1]}$\\cdot 10^{{{e[2].strip('+')}{e[3]}}}$", text)
    if cell.best:
        mean, plus_minus, std = text.partition(r" $\pm$ ")
        return f"\\textbf{{{mean}}}{plus_minus}{std}"
    return text


def _comment(text: str) -> str:
    return f"% {' '.join(text.split())}"


def show(report: Report, console: Console | None = None) -> None:
    """Print the tables, remarks, caveats and commands."""
    console = console or terminal()
    say(console, headline(report))
    for metric in report.metrics:
        rows, indices = table(report, metric), _rows_shown(report, metric)
        grid = Table(title=Text(f"{metric}, {better(report, metric)}"), title_justify="left", box=SIMPLE_HEAD)
        for cell in rows[0]:
            grid.add_column(Text(cell.title), justify="right" if cell.number else "left", overflow="fold")
        for at in indices:
            grid.add_row(*(Text(cell.text, style="bold" if cell.best else "") for cell in rows[at]))
        console.print(grid)
        if len(indices) < len(report.listed):
            say(console, f"The best {len(indices)} of {len(report.listed)} rows; the files have all.")
        _list(console, "  ", list(remarks(report, metric, indices)))
    _list(console, "Note: ", report.marks)
    _list(console, "Not in the tables: ", left_out(report.runs, report.waiting))
    groups = [report.groups[at] for at in _rows_shown(report, report.metrics[0])]
    commands = [f"{group.label}:  {command}" for group in groups for command in group.commands]
    if commands:
        say(console, "Each row again:")
        _list(console, "  ", commands)


def terminal() -> Console:
    """Return the console; a file or a pipe gets the width of the tables."""
    console = Console()
    return console if console.is_terminal or "COLUMNS" in os.environ else Console(width=WIDE)


def say(console: Console, text: str) -> None:
    """Print a line that is not wrapped, so that it can be copied."""
    console.print(text, soft_wrap=True, highlight=False, markup=False)


def _rows_shown(report: Report, metric: str) -> list[int]:
    """Return the rows on the terminal, in order: all, or the best and the baseline."""
    sign = -1 if report.directions[metric] == "max" else 1
    means = [group.mean_of(metric) for group in report.listed]
    ranked = sorted(range(len(means)), key=lambda at: (means[at] is None, sign * (means[at] or 0.0)))[:MOST]
    if len(means) > MOST and report.baseline not in ranked:
        ranked[-1] = report.baseline
    return sorted(ranked)


def _list(console: Console, before: str, lines: Sequence[str]) -> None:
    for line in lines[: MOST // 2]:
        say(console, f"{before}{line}")
    if len(lines) > MOST // 2:
        say(console, f"  and {len(lines) - MOST // 2} more, in the files")
