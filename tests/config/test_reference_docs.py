"""docs/reference is current."""

import re

from support.runs import ROOT

from lathe.config.reference_docs import Book
from lathe.configs import FOLDER

REFERENCE = ROOT / "docs" / "reference"
PAGES = {path.stem: path.read_text() for path in REFERENCE.glob("*.md")}


def test_the_pages_are_current() -> None:
    assert {name.removesuffix(".md"): text for name, text in Book(FOLDER).pages().items()} == PAGES


def test_rows_are_whole_and_links_lead_somewhere() -> None:
    for text in PAGES.values():
        for line in text.splitlines():
            assert not line.startswith("|") or len(re.findall(r"(?<!\\)\|", line)) == 5, line
            for link in re.findall(r"\]\(([^)#]+)\)", line):
                assert (REFERENCE / link).is_file(), link
