"""docs/reference is current and has every key of every component and command."""

import re

import pytest
from support.runs import ROOT

from lathe.config.reference_docs import Book
from lathe.config.schema import command_keys, commands, component_keys
from lathe.configs import FOLDER

REFERENCE = ROOT / "docs" / "reference"
PAGES = {path.stem: path.read_text() for path in REFERENCE.glob("*.md")}


def test_the_pages_are_current() -> None:
    assert {name.removesuffix(".md"): text for name, text in Book(FOLDER).pages().items()} == PAGES


@pytest.mark.parametrize("name", ["lathe.callbacks.EMA", "lathe.nets.CifarResNet", "lightning.Trainer"])
def test_a_component_has_a_table_with_its_arguments(name: str) -> None:
    tables = dict(re.findall(r"^`([\w.]+)`\n\n((?:\|.*\n)*)", "".join(PAGES.values()), flags=re.MULTILINE))
    assert re.findall(r"^\| `(\w+)`", tables[name], flags=re.MULTILINE) == list(component_keys(name) or ())


@pytest.mark.parametrize("command", [name for name in commands() if name not in ("lr_find", "batch_find")])
def test_a_command_has_a_table_with_its_keys(command: str) -> None:
    script = "train.py" if command == "train" else f"scripts/{command}.py"
    body = PAGES["commands"].partition(f"## {script}\n")[2].partition("\n## ")[0]
    named = re.findall(r"^\| `([\w.]+)`", body, flags=re.MULTILINE)
    kinds = {key: schema.get("type") for key, schema in command_keys(command, {}).items()}
    assert {key for key, kind in kinds.items() if kind in ("integer", "string", "boolean", "array")} <= set(named)


def test_rows_are_whole_and_links_lead_somewhere() -> None:
    for text in PAGES.values():
        for line in text.splitlines():
            assert not line.startswith("|") or len(re.findall(r"(?<!\\)\|", line)) == 5, line
            for link in re.findall(r"\]\(([^)#]+)\)", line):
                assert (REFERENCE / link).is_file(), link
