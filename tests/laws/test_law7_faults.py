"""Law 7 for outside faults: a full disk, several processes, a failed job of a sweep."""

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.commands import check, run
from support.runs import SMALL, runs

Cli = Callable[..., tuple[int, str]]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 200 KiB: smaller than a checkpoint of ResNet-20."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=200k", "none", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip("needs the right to mount a file system")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk(cli: Cli, small_disk: Path) -> None:
    words = (word for word in SMALL if not word.startswith("model"))
    result = cli(*words, "trainer.max_epochs=1", "trainer.limit_train_batches=5", f"paths.log_dir={small_disk}")
    code, errors = result
    assert (code, errors.count("\n")) == (1, 1), errors
    for word in ("Error: ", "checkpoints/", ".ckpt", "the disk is full", "paths.log_dir"):
        assert word in errors
    assert [path.name for path in small_disk.rglob(".tmp-*")] == []
    assert list(small_disk.rglob("*.ckpt")) == []


def test_a_mistake_on_two_processes_is_said_once(tmp_path: Path) -> None:
    done = run(*SMALL, "strategy=ddp", "trainer.devices=2", "+model.net.widht=3", cwd=tmp_path)
    assert done.returncode == 1
    assert [line for line in done.stderr.splitlines() if line.startswith("Error")] == done.stderr.splitlines()
    assert done.stderr.count("did you mean width?") == 1
    assert runs(tmp_path / "logs") == []


@pytest.mark.slow
def test_a_sweep_goes_on_after_a_job_that_fails(tmp_path: Path) -> None:
    done = run("-m", *SMALL, "trainer.max_epochs=1", "optimizer.momentum=-1.0,0.9", cwd=tmp_path)
    assert done.returncode == 1
    assert "optimizer.momentum" in done.stderr
    (finished,) = runs(tmp_path / "logs")
    assert (finished / "result.json").exists()
    assert check(run(f"run={finished}", script="scripts/evaluate.py", cwd=tmp_path)).returncode == os.EX_OK
