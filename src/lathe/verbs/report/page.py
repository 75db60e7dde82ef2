"""The report as one HTML file that opens offline: what it may do stands in its own policy, and it asks no network.

Plotly's script (4.8 MB) and the data lie in it compressed, and the browser inflates them. Names and values of runs are
a stranger's: they travel as base64, so nothing of theirs is HTML, and the page's script shows them as text alone.
"""

import base64
import functools
import gzip
import hashlib
import html
import json
import math
import re
from importlib.resources import files
from pathlib import Path
from typing import Any

from lathe.errors import require, uninstalled
from lathe.files import whole
from lathe.html_page import style_sheet
from lathe.verbs.report.curves import FORMS, packed
from lathe.verbs.report.importance import importance

LIMIT = 2_990_000  # bytes of the page, of which Plotly takes 1.96 million; curves get coarser where more runs ask it
SCRIPTS = ("base.js", "filter.js", "table.js", "drawer.js", "plots.js", "sweep.js", "page.js")
# Plotly sets style attributes, which have no hash. Styles can load nothing here.
POLICY = (
    "default-src 'none'; script-src {scripts}; style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'; "
    "form-action 'none'"
)


def write_page(data: dict[str, Any], path: Path) -> None:
    """Writes the page of `data` to `path`, whole or not at all.

    Raises UserError where plotly is not installed.
    """
    text = page(data)
    with whole(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def page(data: dict[str, Any]) -> str:
    """The page, as HTML. `data` is described in docs/report.md.

    Raises UserError where plotly is not installed.
    """
    missing = uninstalled("report", "plotly")
    require(missing is None, f"the report's page: {missing}")
    from plotly.offline import get_plotlyjs

    plotly, script = get_plotlyjs(), "\n".join(map(_file, SCRIPTS))
    parts = {
        "POLICY": POLICY.format(scripts=f"{_hash(script)} {_hash(plotly)}"),
        "TITLE": html.escape(str(data["title"])),
        "STYLE": style_sheet() + _file("page.css"),
        "SCRIPT": script,
        "PLOTLY": _packed_library(),
    }
    template = _file("page.html")
    parts |= _fitting(data, LIMIT - len(template) - sum(len(part.encode()) for part in parts.values()))
    return re.sub("__([A-Z]+)__", lambda mark: parts[mark[1]], template)  # once: a title may look like a mark


def _fitting(data: dict[str, Any], room: int) -> dict[str, str]:
    """The data and the points of their curves, in the finest form of which `room` bytes are enough, else the
    coarsest."""
    found = {}
    shared = {**data, "importance": importance(data)}
    for form in FORMS:
        told, points = packed(shared, form)
        text = json.dumps(_plain(told), separators=(",", ":"), default=str)
        found = {"DATA": _packed(text.encode()), "POINTS": _packed(points)}
        if sum(map(len, found.values())) <= room:
            break
    return found


def _plain(value: Any) -> Any:
    """The same with numbers that JSON has not as words: inf, -inf, nan."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


@functools.cache
def _packed_library() -> str:
    """Which takes longer to pack than all else that a page takes."""
    from plotly.offline import get_plotlyjs

    return _packed(get_plotlyjs().encode())


def _packed(content: bytes) -> str:
    return base64.b64encode(gzip.compress(content, 9, mtime=0)).decode()


def _file(name: str) -> str:
    return files("lathe.verbs.report").joinpath("web", name).read_text(encoding="utf-8")


def _hash(script: str) -> str:
    """The policy's expression for a script of exactly that text."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
