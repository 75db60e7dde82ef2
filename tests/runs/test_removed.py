"""A run directory that is taken away."""

from pathlib import Path
from typing import Any

import pytest

from lathe.runs.rundir import RunDir, create


def new(folder: Path) -> RunDir:
    return create(folder, {"name": "train", "seed": 1, "paths": {}}, [])


def test_removing_takes_an_empty_parent_along_but_not_a_neighbour(tmp_path: Path) -> None:
    one, two = new(tmp_path), new(tmp_path)
    one.remove()
    assert list(tmp_path.glob("*/*")) == [two.path]
    two.remove()
    assert list(tmp_path.iterdir()) == []


def test_a_kill_meanwhile_leaves_no_part_under_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*words: Any, **more: Any) -> None:
        raise KeyboardInterrupt

    one = new(tmp_path)
    monkeypatch.setattr("shutil.rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        one.remove()
    (left,) = (tmp_path / "train").iterdir()
    assert left.name.startswith(".tmp-")  # which the next process sweeps
