"""What the package does in many places it does by one part: moving files to their place, proposing words, drawing plots, averaging."""

import ast
import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.runs import ROOT

from lathe import files

SOURCE = ROOT / "src" / "lathe"
# What only one file may use, by dotted name.
OWNERS = {
    "os.replace": "files.py",
    "os.rename": "files.py",
    "os.fsync": "files.py",
    "shutil.move": "files.py",
    "difflib": "errors.py",
}
METHODS = ("rename",)  # of a path


def used(tree: ast.Module) -> Iterator[str]:
    """Dotted names that a file uses, `module.name` also where it imports the name alone, and modules that it imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield ast.unparse(node)
            yield f".{node.attr}"
        elif isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield str(node.module)
            yield from (f"{node.module}.{name.name}" for name in node.names)


@pytest.mark.parametrize("path", sorted({*SOURCE.rglob("*.py"), *(ROOT / "scripts").glob("*.py")}), ids=str)
def test_one_file_does_it_for_all(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    names = set(used(ast.parse(text)))
    mine = {name for name in names & set(OWNERS) if path != SOURCE / OWNERS[name]}
    assert not mine, f"{path}: {mine} belong to {[OWNERS[name] for name in mine]}"
    assert "<svg" not in text or path == SOURCE / "measure" / "plot.py", f"{path}: plots are drawn by lathe.measure.plot"
    assert not any(f".{method}" in names for method in METHODS), f"{path}: lathe.files.put moves files to their place"
