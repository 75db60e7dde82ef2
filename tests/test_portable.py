"""Features that Windows lacks are checked before use. A module that names one at import breaks all its importers."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from lathe.config.schema import commands

ROOT = Path(__file__).parents[1]
SCRIPTS = [ROOT / "scripts" / f"{verb}.py" for verb in commands() if verb != "train"]
FILES = sorted([*(ROOT / "src" / "lathe").rglob("*.py"), *SCRIPTS, ROOT / "train.py"])
SIGNALS = {"SIGTERM", "SIGINT", "SIGABRT", "SIGFPE", "SIGILL", "SIGSEGV", "SIGBREAK"}  # that Windows has
MODULES = {"fcntl", "grp", "pwd", "resource", "termios", "tty", "pty"}


def at_import(node: ast.AST) -> Iterator[ast.AST]:
    """Return the nodes that run at import: all but the bodies of functions."""
    yield node
    for name, value in ast.iter_fields(node):
        if name == "body" and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from at_import(child)


def lacking(source: str) -> list[str]:
    """Return the names that a module uses at import and Windows lacks."""
    found = []
    for node in at_import(ast.parse(source)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "signal":
            found += [node.attr] if re.fullmatch("SIG[A-Z0-9]+", node.attr) and node.attr not in SIGNALS else []
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [getattr(node, "module", ""), *(name.name for name in node.names)]
            found += [name for name in names if name in MODULES]
    return found


def test_no_module_names_at_import_what_windows_lacks() -> None:
    assert lacking("import signal\nclass A:\n    def f(self, n=signal.SIGUSR1): import fcntl") == ["SIGUSR1"]
    assert lacking("import fcntl\nimport signal\nX = signal.SIGTERM, signal.SIG_DFL") == ["fcntl"]
    assert {path.name: found for path in FILES if (found := lacking(path.read_text()))} == {}
