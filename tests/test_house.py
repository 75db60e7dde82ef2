"""The house can be held in the head: few rooms on few floors, tied by few arrows, none in a circle.
docs/architecture.md draws it.
"""

import re
from functools import cache
from pathlib import Path

import grimp
import pytest
from support.runs import ROOT

ROOMS, LOOSE, FLOORS, ARROWS = 25, 4, 9, 103
SOURCE = ROOT / "src" / "lathe"
BY_NAME = re.compile(r"""import_module\(\s*["'](lathe[\w.]*)["']""")


@cache
def arrows() -> frozenset[tuple[str, str]]:
    """Pairs of rooms of which the first imports the second; the package's own `__init__` is a room as well, and what it
    names in its table is the one thing that it asks of a floor above.
    """
    graph = grimp.build_graph("lathe", cache_dir=None)

    def room(module: str) -> str:
        return module.partition(".")[2].partition(".")[0] or "lathe"

    pairs = {(room(a), room(b)) for a in graph.modules for b in graph.find_modules_directly_imported_by(a)}
    return frozenset((a, b) for a, b in pairs if a != b)


def test_nothing_is_imported_past_the_arrows() -> None:
    """By its name in a string, where no arrow would show it."""
    found = {str(p.relative_to(SOURCE)): BY_NAME.findall(p.read_text(encoding="utf-8")) for p in SOURCE.rglob("*.py")}
    assert {path: names for path, names in found.items() if names} == {}


def rooms() -> list[Path]:
    return [path for path in SOURCE.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()]


def test_rooms_and_arrows_are_few() -> None:
    loose = sorted(path.name for path in rooms() if path.suffix == ".py")
    assert loose == ["__init__.py", "errors.py", "files.py", "html_page.py"]
    assert len(loose) == LOOSE
    assert len(rooms()) <= ROOMS
    assert 0 < len(arrows()) <= ARROWS


def test_floors_are_few_and_nothing_goes_in_a_circle() -> None:
    def floor(room: str, above: tuple[str, ...] = ()) -> int:
        assert room not in above, f"a circle: {' -> '.join((*above, room))}"
        return 1 + max((floor(below, (*above, room)) for a, below in arrows() if a == room), default=0)

    assert max(floor(room) for room, _ in arrows()) <= FLOORS


@pytest.mark.parametrize("path", sorted((ROOT / "scripts").glob("*.py")), ids=lambda path: path.stem)
def test_a_script_runs_the_verb_of_its_name(path: Path) -> None:
    """Of those that hand a job to the launch; the others are whole in their own file."""
    text = path.read_text(encoding="utf-8")
    if "launch_on_run(cfg" in text:
        package = (SOURCE / "verbs" / path.stem).is_dir()
        assert f'"lathe.verbs.{path.stem}:' in text
        assert package or (SOURCE / "verbs" / path.name).is_file()


def test_the_formatter_has_every_line() -> None:
    held = [path for folder in ("src", "tests", "scripts", "benchmarks") for path in (ROOT / folder).rglob("*.py")]
    assert len(held) > 100
    word = "fmt: " + "skip"
    assert [str(path.relative_to(ROOT)) for path in held if word in path.read_text(encoding="utf-8")] == []
