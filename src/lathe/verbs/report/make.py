"""Make a report: collect the runs, write the files and print it."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lathe.errors import require, uninstalled
from lathe.files import write_atomically
from lathe.runs.run_discovery import is_run
from lathe.verbs.report.assemble import Report, assemble
from lathe.verbs.report.data import page_data
from lathe.verbs.report.find import common_folder
from lathe.verbs.report.latex import latex
from lathe.verbs.report.markdown import markdown
from lathe.verbs.report.page import write_page
from lathe.verbs.report.screen import show, tell_files
from lathe.verbs.report.tables import groups_csv, runs_csv

PAGE = "report.html"
TEXTS = {
    "markdown": {"report.md": markdown},
    "csv": {"groups.csv": groups_csv, "runs.csv": runs_csv},
    "latex": {"report.tex": latex},
}


def report(settings: Mapping[str, Any]) -> Report:
    """Build, write and print the report that the keys of configs/report.yaml request."""
    formats = settings["formats"]
    lacking = uninstalled("report", "scipy", *(["plotly"] if "html" in formats else []))
    require(lacking is None, str(lacking))
    named = [settings["runs"]] if isinstance(settings["runs"], str) else settings["runs"]
    told = assemble({**settings, "runs": named})
    folder = _folder(settings["output"], named)
    texts = {name: make(told) for kind in formats if kind in TEXTS for name, make in TEXTS[kind].items()}
    pages = {PAGE: page_data(told, folder)} if "html" in formats else {}
    if formats:
        folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        write_atomically(folder / name, text)
    for name, data in pages.items():
        write_page(data, folder / name)
    show(told)
    tell_files(os.path.relpath(folder / name) for name in (*texts, *pages))
    return told


def _folder(output: str | None, named: list[str]) -> Path:
    """Return the output folder, by default `report` in the folder that contains all runs."""
    folder = common_folder(named) / "report" if output is None else Path(output)
    place = f"output={folder}"
    require(not folder.exists() or folder.is_dir(), f"{place} is a file: name a folder.")
    inside = next((above for above in (folder, *folder.absolute().parents) if is_run(above)), None)
    require(inside is None, f"{place} lies in the run directory {inside}, which is the run's own: name another folder.")
    return folder
