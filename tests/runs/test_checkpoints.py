"""Checkpoint files are read without running code, their weights must fit the net, and older exports are refused."""

import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from lathe.errors import UserError
from lathe.runs.checkpoints import KEY, check_current, checkpoint_hash, is_outdated, load_weights, read_checkpoint
from lathe.runs.rundir import RunDir


def test_a_checkpoint_is_read_and_a_part_of_one_refused(tmp_path: Path) -> None:
    path = tmp_path / "good.ckpt"
    torch.save({"state_dict": {"weight": torch.ones(2, 3)}, "global_step": 7, "epoch": 1}, path)
    state = read_checkpoint(path)
    assert state["global_step"] == 7
    assert torch.equal(state["state_dict"]["weight"], torch.ones(2, 3))
    for content in (b"", b"text\n", b"\x80\x04garbage", path.read_bytes()[:500]):
        path.write_bytes(content)
        with pytest.raises(UserError, match=r"^ckpt_path=.*good\.ckpt (can't be read as|is not) a checkpoint"):
            read_checkpoint(path, "ckpt_path")


FITS = {"weight": torch.ones(2, 3), "bias": torch.ones(2)}


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"weight": torch.ones(2, 3)}, "it has no bias;"),
        (FITS | {"weight": torch.ones(2, 4)}, "weight is [2, 4] there and [2, 3] here;"),
        (FITS | {"z": torch.ones(1), "extra": torch.ones(1)}, "it also has extra;"),
    ],
)
def test_weights_that_do_not_fit_are_named_and_none_is_loaded(weights: dict[str, torch.Tensor], message: str) -> None:
    net = nn.Linear(3, 2)
    before = net.weight.detach().clone()
    with pytest.raises(UserError) as caught:
        load_weights(net, weights, "a")
    assert str(caught.value).startswith(f"a does not fit this net: {message}")
    assert torch.equal(net.weight, before)


# Exports of a run that was resumed


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
