"""Exports of a run that was resumed are of earlier weights."""

import shutil
from pathlib import Path

import pytest

from lathe.errors import UserError
from lathe.runs.checkpoints import KEY, check_current, checkpoint_hash, is_outdated
from lathe.runs.rundir import RunDir


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    (tmp_path / "checkpoints").mkdir()
    for name in ("best", "last"):
        (tmp_path / "checkpoints" / f"{name}.ckpt").write_text(f"weights of {name}")
    return RunDir(tmp_path)


def test_an_export_of_earlier_weights_is_refused(run: RunDir) -> None:
    name, path = "last", run.last
    manifest = {"checkpoint": name, KEY: checkpoint_hash(path)}
    check_current(run, "onnx", manifest)
    path.write_text("later weights")
    with pytest.raises(UserError, match=r"exports/onnx is of an earlier last\.ckpt: .*target=onnx checkpoint=last, or"):
        check_current(run, "onnx", manifest)
    path.unlink()  # only the exports were kept
    check_current(run, "onnx", manifest)
    assert not is_outdated(run, {"checkpoint": name})


def test_a_sharded_checkpoint_is_hashed_by_its_files(run: RunDir) -> None:
    run.best.unlink()
    run.best.mkdir()
    (run.best / "meta.pt").write_text("a")
    (run.best / "part").write_text("b")
    manifest = {"checkpoint": "best", KEY: checkpoint_hash(run.best)}
    shutil.copytree(run.best, run.path / "checkpoints/other.ckpt")
    assert checkpoint_hash(run.path / "checkpoints/other.ckpt") == manifest[KEY]
    assert not is_outdated(run, manifest)
    (run.best / "part").write_text("c")
    assert is_outdated(run, manifest)
