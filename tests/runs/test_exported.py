"""A run that is trained on keeps its exports, which are of earlier weights then."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from lathe.errors import UserError
from lathe.runs.export_staleness import KEY, check_current, checkpoint_hash, is_outdated
from lathe.runs.rundir import RunDir


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    (tmp_path / "checkpoints").mkdir()
    for name in ("best", "last"):
        (tmp_path / "checkpoints" / f"{name}.ckpt").write_text(f"weights of {name}")
    return RunDir(tmp_path)


@pytest.mark.parametrize(("name", "word"), [("best", ""), ("last", " checkpoint=last")])
def test_an_export_of_earlier_weights_is_refused(run: RunDir, name: str, word: str) -> None:
    path = run.path / "checkpoints" / f"{name}.ckpt"
    manifest = {"checkpoint": name, KEY: checkpoint_hash(path)}
    check_current(run, "onnx", manifest)
    path.write_text("trained on")
    assert is_outdated(run, manifest)
    sentence = (
        f"target=onnx: exports/onnx is of an earlier {name}.ckpt: export the run again with python scripts/export.py "
        f"run={run.path} target=onnx{word}, or take target=module, the run's own net."
    )
    with pytest.raises(UserError, match=f"^{re.escape(sentence)}$"):
        check_current(run, "onnx", manifest)
    path.unlink()  # a run of which only its exports were kept
    check_current(run, "onnx", manifest)


@pytest.mark.parametrize("manifest", [{"checkpoint": "best"}, {"checkpoint": "../../x", KEY: "0" * 64}])
def test_where_nobody_can_tell_nothing_is_said(run: RunDir, manifest: dict[str, Any]) -> None:
    """A manifest without a hash, and one of a checkpoint that no run has."""
    assert not is_outdated(run, manifest)


def test_a_folder_is_told_by_its_files(run: RunDir) -> None:
    run.best.unlink()
    run.best.mkdir()
    (run.best / "meta.pt").write_text("a")
    (run.best / "part").write_text("b")
    manifest = {"checkpoint": "best", KEY: checkpoint_hash(run.best)}
    assert not is_outdated(run, manifest)
    shutil.copytree(run.best, run.path / "checkpoints/other.ckpt")
    assert checkpoint_hash(run.path / "checkpoints/other.ckpt") == manifest[KEY]
    (run.best / "part").write_text("c")
    assert is_outdated(run, manifest)
