"""What many places need is done by one file for all: moving files to their place, proposing words, drawing plots."""

import ast
from collections.abc import Iterator

from support.runs import ROOT

SOURCE = ROOT / "src" / "lathe"
# What only one file may use, by dotted name.
OWNERS = {
    "os.replace": "files.py",
    "os.rename": "files.py",
    "os.fsync": "files.py",
    "shutil.move": "files.py",
    "difflib": "errors.py",
}


def used(tree: ast.Module) -> Iterator[str]:
    """Dotted names that a file uses, also where it imports the last alone, and modules that it imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield ast.unparse(node)
            yield f".{node.attr}"
        elif isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield str(node.module)
            yield from (f"{node.module}.{name.name}" for name in node.names)


def test_one_file_does_it_for_all() -> None:
    wrong = []
    for path in (*SOURCE.rglob("*.py"), *(ROOT / "scripts").glob("*.py")):
        text = path.read_text(encoding="utf-8")
        names = set(used(ast.parse(text)))
        wrong += [
            f"{path}: {name} belongs to {OWNERS[name]}" for name in names & set(OWNERS) if path != SOURCE / OWNERS[name]
        ]
        if "<svg" in text and path != SOURCE / "measure" / "plot.py":
            wrong.append(f"{path}: lathe.measure.plot draws")
        if ".rename" in names:
            wrong.append(f"{path}: lathe.files moves files to their place")
    assert wrong == []
