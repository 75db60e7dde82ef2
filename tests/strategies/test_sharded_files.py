"""A sharded checkpoint is complete or the previous one; reading it executes no code."""

import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.ranks import on_ranks
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from lathe.errors import UserError
from lathe.runs.checkpoints import read_checkpoint
from lathe.strategies import sharded_files

WEIGHT, BIAS = torch.arange(10.0).view(5, 2), torch.ones(5)


def checkpoint(step: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2,))
    spread = distribute_tensor(WEIGHT + step, mesh, [Shard(0)])
    moments = {0: {"exp_avg": spread * 2, "step": torch.tensor(float(step))}}
    optimizer = {"state": moments, "param_groups": [{"params": [0], "lr": 0.1}]}
    return {"state_dict": {"weight": spread, "bias": BIAS}, "optimizer_states": [optimizer], "global_step": step}


def write(rank: int, folder: Path) -> list[list[str]]:
    """Write two checkpoints, then die while writing a third; return the files after each."""
    path, seen = folder / "last.ckpt", []
    for step in (1, 2):
        sharded_files.save(checkpoint(step), path)
        seen.append(sorted(os.listdir(folder)))
        torch.distributed.barrier()
    finish = FileSystemWriter.finish

    def die(*_: Any, **__: Any) -> None:
        raise RuntimeError("killed")

    FileSystemWriter.finish = die  # type: ignore[method-assign]
    try:
        sharded_files.save(checkpoint(3), path)
    except dcp.CheckpointException:
        seen.append(sorted(os.listdir(folder)))
    finally:
        FileSystemWriter.finish = finish  # type: ignore[method-assign]
    torch.distributed.barrier()
    return seen


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[list[str]]]]:
    folder = tmp_path_factory.mktemp("files")
    return folder, on_ranks(write, folder)


@pytest.fixture
def path(written: tuple[Path, Any], tmp_path: Path) -> Path:
    """A copy, to be damaged."""
    shutil.copytree(written[0] / "last.ckpt", tmp_path / "last.ckpt")
    return tmp_path / "last.ckpt"


def test_one_process_reads_it_as_one_file(written: tuple[Path, Any]) -> None:
    state = read_checkpoint(written[0] / "last.ckpt")
    assert state["global_step"] == 2  # the third was never finished
    assert torch.equal(state["state_dict"]["weight"], WEIGHT + 2)
    assert torch.equal(state["state_dict"]["bias"], BIAS)
    entry = state["optimizer_states"][0]["state"][0]
    assert torch.equal(entry["exp_avg"], (WEIGHT + 2) * 2)
    assert entry["step"] == 2
    assert state["optimizer_states"][0]["param_groups"] == [{"params": [0], "lr": 0.1}]
    assert list(state["state_dict"]) == ["weight", "bias"]


def test_old_ones_are_removed_and_the_link_is_switched(written: tuple[Path, list[list[list[str]]]]) -> None:
    first, second, third = written[1][0]
    assert len(first) == len(second) == 2
    assert first[1] == second[1] == "last.ckpt"
    assert first[0] != second[0]
    assert second[0] in third  # a kill leaves the previous one
    folder = written[0]
    assert os.readlink(folder / "last.ckpt") == second[0]


def test_what_a_dead_writer_left_is_swept(written: tuple[Path, Any], tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(written[0], copy, symlinks=True)
    (copy / ".best.ckpt.1234").mkdir()  # another checkpoint's
    sharded_files.sweep(copy / "last.ckpt")
    link = os.readlink(copy / "last.ckpt")
    assert sorted(os.listdir(copy)) == sorted([".best.ckpt.1234", link, "last.ckpt"])
    assert read_checkpoint(copy / "last.ckpt")["global_step"] == 2  # the link is relative, so that a run can be moved


class Trap:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self.mark,)


def test_torchs_table_of_contents_is_not_read(path: Path, tmp_path: Path) -> None:
    (path / ".metadata").write_bytes(pickle.dumps(Trap(tmp_path / "ran")))
    assert read_checkpoint(path, "ckpt_path")["global_step"] == 2
    assert not (tmp_path / "ran").exists()


def test_a_table_that_points_elsewhere_is_refused(path: Path) -> None:
    meta = torch.load(path / "meta.pt", weights_only=True)
    meta["shards"]["state_dict/weight"]["chunks"][0][2] = "../secret"
    torch.save(meta, path / "meta.pt")
    with pytest.raises(UserError, match="is not a checkpoint of plain tensors"):
        read_checkpoint(path)


def test_hostile_plain_parts_are_not_run(path: Path, tmp_path: Path) -> None:
    torch.save({"checkpoint": Trap(tmp_path / "ran"), "spread": {}}, path / "meta.pt")
    with pytest.raises(UserError, match="is not a checkpoint of plain tensors"):
        read_checkpoint(path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["meta.pt", "__1_0.distcp"])
@pytest.mark.parametrize("share", [None, 0.5])
def test_a_damaged_folder_is_refused(path: Path, name: str, share: float | None) -> None:
    file = path / name
    whole = file.read_bytes()
    file.unlink()
    if share is not None:
        file.write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(UserError, match=r"^ckpt_path=.*(is cut off|not a checkpoint of plain|there is no such file)"):
        read_checkpoint(path, "ckpt_path")
