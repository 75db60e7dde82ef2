"""Each command of docs/coming_from.md composes, and holds what its configuration takes."""

import re
import shlex

import pytest
from support.runs import ROOT, config

import lathe
from lathe.config.composed import check
from lathe.config.words import translate

PAGE = (ROOT / "docs" / "coming_from.md").read_text()
COMMANDS = re.findall(r"`(python (?:train|scripts/\w+)\.py[^`]*)`", PAGE)
HERE = [row.split(" | ")[1] for row in PAGE.splitlines() if row.startswith("| ") and " | " in row]


def test_every_row_has_what_is_typed_or_written_here() -> None:
    rows = [cell for cell in HERE if cell != "here"]
    assert len(rows) > 40
    for cell in rows:
        assert re.fullmatch(r"`(python (train|scripts/\w+)\.py.*|lathe\..*)`", cell), cell
    for name in re.findall(r"`lathe\.(\w+)", PAGE):
        assert name == "tasks" or hasattr(lathe, name)


@pytest.mark.parametrize("command", sorted(set(COMMANDS)))
def test_a_command_is_one(command: str) -> None:
    script, *words = shlex.split(command)[1:]
    verb = script.rpartition("/")[2].removesuffix(".py")
    assert (ROOT / script).is_file()
    if "--cfg" in words or "hydra/sweeper" in command:
        words = []
    first = [re.sub(r"^([\w.]+=)([^\[{,]+),.*$", r"\1\2", word) for word in words if word != "-m"]
    groups = {path.name: [file.stem for file in path.glob("*.yaml")] for path in (ROOT / "configs").iterdir()}
    cfg = config(*translate(first, groups), name=verb)
    assert check(cfg, verb) == []
