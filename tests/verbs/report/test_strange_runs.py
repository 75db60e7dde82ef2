"""Run directories as nobody's training leaves them: a report counts what can be counted and goes on."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.reports import REQUEST as USUAL
from support.run_directories import write_run

from lathe.verbs.report.data import page_data
from lathe.verbs.report.make import report

REQUEST = {**USUAL, "formats": ["markdown", "csv", "latex"]}
ODD: list[Any] = [None, [], {}, [1], {"a": [None]}, "word", 10**400, -1.5, True, "\x1b[31m\n"]


def told(folder: Path) -> Any:
    found = report({**REQUEST, "runs": str(folder / "train"), "output": str(folder / "out")})
    assert len(list((folder / "out").iterdir())) == 4
    json.dumps(page_data(found), allow_nan=False)
    return found


@pytest.mark.parametrize("odd", ODD, ids=repr)
@pytest.mark.parametrize("name", ["result.json", "environment.json", "receipt.json"])
def test_files_of_any_content_are_no_bug(tmp_path: Path, name: str, odd: Any) -> None:
    write_run(tmp_path, 0, 0.8, seed=1)
    path = write_run(tmp_path, 1, 0.9, seed=2) / name
    before = json.loads(path.read_text()) if path.exists() else {}
    before = before or {"ships": 1, "files": 1, "size": 1, "latency": 1, "findings": 1}
    path.write_text(json.dumps(dict.fromkeys(before, odd)))
    found = told(tmp_path)
    assert [run.state for run in found.runs] in (["complete"] * 2, ["complete", "pruned"])
    assert found.groups[0].values("test/accuracy").popitem()[1] in (0.8, 0.9, -1.5)
    assert all("\x1b" not in (tmp_path / "out" / file).read_text() for file in ("report.md", "report.tex", "runs.csv"))


@pytest.mark.parametrize("odd", ODD, ids=repr)
@pytest.mark.parametrize("key", ["seed", "name", "data", "objective", "callbacks", "trainer", "model"])
def test_configurations_of_any_content_are_no_bug(tmp_path: Path, key: str, odd: Any) -> None:
    write_run(tmp_path, 0, 0.8, seed=1)
    path = write_run(tmp_path, 1, 0.9, seed=2) / "config.yaml"
    lines = path.read_text().splitlines(keepends=True)
    start = next(at for at, line in enumerate(lines) if line.startswith(f"{key}:"))
    end = next((at for at in range(start + 1, len(lines)) if lines[at][0] not in " -"), len(lines))
    path.write_text("".join([*lines[:start], f"{key}: {json.dumps(odd)}\n", *lines[end:]]))
    found = told(tmp_path)
    assert sum(len(group.units) for group in found.groups) == 2
    assert all("\x1b" not in (tmp_path / "out" / name).read_text() for name in ("report.md", "report.tex", "runs.csv"))


def test_keys_of_any_name_are_no_bug(tmp_path: Path) -> None:
    for at in (0, 1):
        path = write_run(tmp_path, at, 0.8, seed=1) / "config.yaml"
        path.write_text(path.read_text() + f'"\\e[31m|&_\\n\\\\end{{x}}": {at}\n')
    found = told(tmp_path)
    assert [group.label for group in found.groups] == [f"\\x1b[31m|&_\\n\\\\end{{x}}={at}" for at in (0, 1)]
    tex = (tmp_path / "out" / "report.tex").read_text()
    assert r"\textbackslash{}x1b[31m|\&\_\textbackslash{}n\textbackslash{}\textbackslash{}end\{x\}" in tex
