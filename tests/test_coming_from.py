"""Each command of docs/coming_from.md composes and has a valid configuration."""

import re

from support.runs import ROOT

import lathe

PAGE = (ROOT / "docs" / "coming_from.md").read_text()
HERE = [row.split(" | ")[1] for row in PAGE.splitlines() if row.startswith("| ") and " | " in row]


def test_every_row_has_what_is_typed_or_written_here() -> None:
    rows = [cell for cell in HERE if cell != "here"]
    for cell in rows:
        assert re.fullmatch(r"`(python (train|scripts/\w+)\.py.*|lathe\..*)`", cell), cell
    for name in re.findall(r"`lathe\.(\w+)", PAGE):
        assert name == "tasks" or hasattr(lathe, name)
