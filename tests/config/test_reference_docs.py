"""docs/reference is current and has every key of every component and command."""

import re

import pytest
from support.documented import commands as commands_on
from support.documented import mistakes
from support.runs import ROOT

from lathe.config.reference_docs import Book
from lathe.config.schema import component_keys, definitions
from lathe.configs import FOLDER

REFERENCE = ROOT / "docs" / "reference"
PAGES = {path.stem: path.read_text() for path in REFERENCE.glob("*.md")}


def keys(text: str) -> set[str]:
    """Return the keys that a page describes."""
    listed = re.findall(r"^- (?:In no file: .*|.* Keys: .*|`[\w.]+)", text, flags=re.MULTILINE)
    return {key for line in listed for key in re.findall(r"`([\w.]+)", line)}


def test_the_pages_are_current() -> None:
    assert {name.removesuffix(".md"): text for name, text in Book(FOLDER).pages().items()} == PAGES


def test_each_argument_of_a_class_that_a_choice_builds_is_on_its_page() -> None:
    book = Book(FOLDER)
    missing = []
    for place, names in book.built.items():
        group = re.split(r"[.\[]", place)[0]
        for name in names if f"{group}/*.yaml" in definitions() else ():
            last = {key.rpartition(".")[2] for key in keys(PAGES[group])}
            built_inside = {key.removeprefix(f"{place}.").partition(".")[0] for key in book.built if key != place}
            missing += [f"{place}.{key}" for key in component_keys(name) or {} if key not in last | built_inside]
    # options of other optimizer classes than those that a file chooses
    assert [key for key in missing if not key.startswith("optimizer.")] == []


@pytest.mark.parametrize("name", sorted(PAGES))
def test_examples_compose_and_links_lead_somewhere(name: str) -> None:
    for command in commands_on(REFERENCE / f"{name}.md"):
        assert mistakes(command) == [], command
    for link in re.findall(r"\]\(([^)#]+)\)", PAGES[name]):
        assert (REFERENCE / link).is_file(), link
