"""Several run directories, as for scripts/runs.py."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

Cli = Callable[..., tuple[int, str]]


def run_dirs(folder: Path) -> list[Path]:
    return sorted(path.parent for path in folder.glob("[!l.]*/*/config.yaml"))


def edit(path: Path, name: str, **changes: Any) -> None:
    tree = yaml.safe_load((path / name).read_text())
    for key, value in changes.items():
        tree[key] = {**tree[key], **value} if isinstance(value, dict) else value
    (path / name).write_text(yaml.safe_dump(tree))


def refused(cli: Cli, *words: str) -> str:
    code, error = cli(*words, script="scripts/runs.py")
    assert code == 1
    assert error.count("\n") == 1, error
    return error.removeprefix("Error: ").rstrip()
