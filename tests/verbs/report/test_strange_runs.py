"""Run directories as nobody's training leaves them: a report counts what can be counted and goes on."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from support.reports import REQUEST as USUAL
from support.run_directories import write_run

from lathe.verbs.report.data import page_data
from lathe.verbs.report.groups import find_baseline
from lathe.verbs.report.make import report

REQUEST = {**USUAL, "formats": ["markdown", "csv", "latex"]}


def told(folder: Path) -> Any:
    found = report({**REQUEST, "runs": str(folder / "train"), "output": str(folder / "out")})
    assert len(list((folder / "out").iterdir())) == 4
    json.dumps(page_data(found), allow_nan=False)
    return found


def test_keys_of_any_name_are_no_bug(tmp_path: Path) -> None:
    for at in (0, 1):
        path = write_run(tmp_path, at, 0.8, seed=1) / "config.yaml"
        path.write_text(path.read_text() + f'"\\e[31m|&_\\n\\\\end{{x}}": {at}\n')
    found = told(tmp_path)
    assert [group.label for group in found.groups] == [f"\\x1b[31m|&_\\n\\\\end{{x}}={at}" for at in (0, 1)]
    tex = (tmp_path / "out" / "report.tex").read_text()
    assert r"\textbackslash{}x1b[31m|\&\_\textbackslash{}n\textbackslash{}\textbackslash{}end\{x\}" in tex


# every kind of value that YAML has, as it is written there
VALUES = ["null", "true", "1", "0.5", "1" + "0" * 400, ".nan", "word", "'a,b'", "''", "2026-11-24", "{}", "[]"]
VALUES += ["[0.9, 0.99]", "[[a], [null, 1]]", "{a: {}}", "{a: [1]}"]


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run for each kind of value, with a rate of its own."""
    folder = tmp_path_factory.mktemp("kinds")
    for at, value in enumerate(VALUES):
        path = write_run(folder, at, 0.8 + at / 100, [f"optimizer={('sgd', 'adamw')[at % 2]}"])
        text = (path / "config.yaml").read_text().replace("\noptimizer:\n", f"\noptimizer:\n  odd: {value}\n")
        (path / "config.yaml").write_text(re.sub(r"(?m)^  lr: .*", f"  lr: {(at + 1) / 100}", text))
    return folder


@pytest.mark.parametrize(
    ("by", "count"),
    # {a: {}} and {a: [1]} lie below the key, which their runs have not
    [(None, len(VALUES)), ("optimizer.odd", len(VALUES) - 1), ("optimizer", 2), ("optimizer.lr", len(VALUES))],
)
def test_a_factor_of_any_kind_is_no_bug_in_by_or_beside_it(
    kinds: Path, tmp_path: Path, by: str | None, count: int
) -> None:
    found = report({**REQUEST, "runs": str(kinds / "train"), "output": str(tmp_path), "by": by})
    json.dumps(page_data(found), allow_nan=False)
    assert (len(found.groups), sum(len(group.units) for group in found.groups)) == (count, len(VALUES))
    assert [find_baseline(found.groups, group.label) for group in found.groups] == list(range(count))
