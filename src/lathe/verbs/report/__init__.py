"""Compare runs: their differences, means with intervals, paired tests, and a page of plots (scripts/report.py)."""

import os
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lathe.errors import require, uninstalled
from lathe.files import write_atomically
from lathe.runs.run_discovery import is_run
from lathe.verbs.report.assemble import Report, assemble
from lathe.verbs.report.groups import Differences
from lathe.verbs.report.page import page as as_html
from lathe.verbs.report.page import page_data
from lathe.verbs.report.tables import groups_csv, latex, markdown, runs_csv, say, show, terminal
from lathe.verbs.runs.other_tools import find_all_runs
from lathe.verbs.runs.reader import paths_of

__all__ = ["report", "runs_frame"]
TEXTS = {
    "markdown": {"report.md": markdown},
    "csv": {"groups.csv": groups_csv, "runs.csv": runs_csv},
    "latex": {"report.tex": latex},
}


def report(request: Mapping[str, Any]) -> Report:
    """Build, write and print the report that the keys of configs/report.yaml request."""
    formats = request["formats"]
    lacking = uninstalled("report", "scipy")
    require(lacking is None, str(lacking))
    result = assemble(request)
    folder = _folder(request["output"], [request["runs"]] if isinstance(request["runs"], str) else request["runs"])
    texts = {name: make(result) for kind in formats if kind in TEXTS for name, make in TEXTS[kind].items()}
    if "html" in formats:
        texts["report.html"] = as_html(page_data(result, folder))
    if texts:
        folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        write_atomically(folder / name, text)
    show(result)
    if texts:
        say(terminal(), f"Written: {', '.join(os.path.relpath(folder / name) for name in texts)}")
    return result


def runs_frame(runs: str | Sequence[str] = "logs") -> Any:
    """Return a row for each run below `runs`, paths or patterns: a pandas DataFrame if pandas is installed, else dicts.

    Columns are run, name, state, date, seed, steps and tags, the final metrics by name, and the configuration keys that
    differ between the runs. Raises UserError for a path without runs.
    """
    all_runs = find_all_runs(runs)
    differing = Differences([run for run in all_runs if run.leaves]).keys
    columns = ("name", "state", "date", "seed", "steps", "tags")
    rows = [
        {"run": run.where}
        | {name: run.value(name) for name in columns}
        | run.metrics
        | {key: run.leaves.get(key) for key in differing}
        for run in all_runs
    ]
    return import_module("pandas").DataFrame(rows) if find_spec("pandas") is not None else rows


def _folder(output: str | None, patterns: list[str]) -> Path:
    """Return the output folder, by default `report` in the folder that contains all runs, or here."""
    if output is not None:
        folder = Path(output)
    else:
        paths = [path.resolve() for pattern in patterns for path in paths_of(pattern)]
        folders = [path.parent if is_run(path) or path.is_file() else path for path in paths]
        common = Path(os.path.commonpath(folders))
        folder = Path("report") if common in Path.cwd().parents else common / "report"
    inside = next((above for above in (folder, *folder.absolute().parents) if is_run(above)), None)
    require(inside is None, f"output={folder} lies in the run directory {inside}: name another folder.")
    return folder
