"""The report as one HTML file that works offline, with a content security policy.

Plotly's script (4.8 MB) and the data are embedded compressed, and the browser inflates them. Names and values of runs
are untrusted: they are embedded as base64, and the page's script shows them as text.
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

LIMIT = 2_990_000  # bytes of the page, 1.96 million of them Plotly; curves get coarser with many runs
SCRIPTS = ("base.js", "filter.js", "table.js", "drawer.js", "plots.js", "sweep.js", "page.js")
# Plotly sets style attributes, which can't be hashed; styles can't load anything here
POLICY = (
    "default-src 'none'; script-src {scripts}; style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'; "
    "form-action 'none'"
)


def write_page(data: dict[str, Any], path: Path) -> None:
    """Write the page of `data` to `path` atomically; raise UserError if plotly is not installed."""
    text = page(data)
    with whole(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def page(data: dict[str, Any]) -> str:
    """Return the page as HTML; docs/report.md describes `data`. Raise UserError without plotly."""
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
    return re.sub(
        "__([A-Z]+)__", lambda mark: parts[mark[1]], template
    )  # in one pass: a title may contain a placeholder


def _fitting(data: dict[str, Any], room: int) -> dict[str, str]:
    """Return the data and curves in the finest form of at most `room` bytes, else the coarsest."""
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
    """Return a value with inf, -inf and nan as text, which JSON lacks."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


@functools.cache
def _packed_library() -> str:
    """Compress Plotly's script, the slowest part of the page."""
    from plotly.offline import get_plotlyjs

    return _packed(get_plotlyjs().encode())


def _packed(content: bytes) -> str:
    return base64.b64encode(gzip.compress(content, 9, mtime=0)).decode()


def _file(name: str) -> str:
    return files("lathe.verbs.report").joinpath("web", name).read_text(encoding="utf-8")


def _hash(script: str) -> str:
    """Return the policy's expression for a script of exactly that text."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
