"""Configurations are read in the parts that they share, with the same result as one by one."""

from pathlib import Path
from typing import Any

import pytest
from support.run_directories import write_run

from lathe.errors import UserError
from lathe.trust.safe_yaml import read_mapping, read_yaml


def both(path: Path, known: dict[str, Any]) -> tuple[Any, Any]:
    """Return both readers' results: a value, or the message of its error."""
    found: list[Any] = []
    for read in (lambda: read_yaml(path, "it"), lambda: read_mapping(path, "it", known)):
        try:
            found.append(read())
        except UserError as error:
            found.append(str(error))
    return found[0], found[1]


def test_configurations_of_runs_share_what_is_equal(tmp_path: Path) -> None:
    known: dict[str, Any] = {}
    for at, width in enumerate((4, 8, 4)):
        path = write_run(tmp_path, at, words=[f"model.net.width={width}"], seed=at) / "config.yaml"
        alone, shared = both(path, known)
        assert alone == shared
        assert shared["model"]["net"]["width"] == width


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a: 1\nb:\n- 1\n- c: 2\nd:\n  e: f\n",
        "a: 1\n---\nb: 2\n",
        "a: 1\na: 2\n",
        "a: 'x\n  y: z'\nb: 1\n",
        "a: |\n  b: 1\n\n  c: 2\nd: 3\n",
        "a: &x 1\nb: *x\n",
        "a: !!python/name:os.system\nb: 1\n",
        "a: 1e-3\nb: 0o7\nc: 1_000\nd: null\ne: ~\nf: .inf\n",
        "a: " + "[" * 60 + "]" * 60 + "\nb: 1\n",
    ],
)
def test_strange_files_read_the_same(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text, encoding="utf-8", newline="")
    known: dict[str, Any] = {}
    for _ in range(2):  # the second time its parts are cached
        alone, shared = both(path, known)
        assert repr(alone) == repr(shared)
