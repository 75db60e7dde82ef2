"""Atomic writes, cleanup after killed processes, messages for disk errors."""

import errno
import os
import platform
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.runs import SMALL, new_run

from lathe import files
from lathe.files import disk_sentence, followed, write_atomically
from lathe.runs import rundir
from lathe.runs.run_discovery import find_runs


def dead() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def named(process: int, rest: str, machine: str | None = None) -> str:
    return f".tmp-{machine or re.sub(r'[^0-9A-Za-z_]', '_', platform.node())}-{process}.{rest}"


def test_files_of_dead_processes_are_removed(tmp_path: Path) -> None:
    gone, alive = dead(), os.getppid()
    for name in (
        named(gone, "last.ckpt"),
        named(alive, "last.ckpt"),
        named(gone, "x.csv", "elsewhere"),
        ".hidden",
        "last.ckpt",
    ):
        (tmp_path / name).write_text(name)
    (tmp_path / named(gone, "onnx")).mkdir()
    (tmp_path / named(gone, "onnx") / "half").write_text("")
    (tmp_path / named(gone, "latest")).symlink_to(tmp_path)
    files.sweep(tmp_path, tmp_path / "nowhere")
    kept = {named(alive, "last.ckpt"), named(gone, "x.csv", "elsewhere"), ".hidden", "last.ckpt"}
    assert set(os.listdir(tmp_path)) == kept
    os.utime(tmp_path / named(gone, "x.csv", "elsewhere"), (1, 1))  # of another machine, older than a day
    files.sweep(tmp_path)
    assert set(os.listdir(tmp_path)) == kept - {named(gone, "x.csv", "elsewhere")}


def test_a_file_set_aside_is_restored_if_nothing_replaced_it(tmp_path: Path) -> None:
    old = tmp_path / named(dead(), "onnx.old")
    old.mkdir()
    (old / "file").write_text("earlier")
    files.sweep(tmp_path)
    assert (tmp_path / "onnx" / "file").read_text() == "earlier"
    again = tmp_path / named(dead(), "onnx.old")
    again.mkdir()
    files.sweep(tmp_path)
    assert os.listdir(tmp_path) == ["onnx"]
    assert (tmp_path / "onnx" / "file").read_text() == "earlier"


def test_temporary_folders_of_dead_processes_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    left = files.scratch_prefix().replace(f"-{os.getpid()}-", f"-{dead()}-") + "abc"
    (tmp_path / left).mkdir()
    with files.scratch() as folder:
        assert os.listdir(tmp_path) == [folder.name]
        files.sweep(tmp_path)
        assert folder.is_dir()
    assert os.listdir(tmp_path) == []


def test_opening_a_run_directory_removes_temporary_files(tmp_path: Path) -> None:
    run = rundir.RunDir(new_run(tmp_path, *SMALL)["paths"]["run_dir"])
    gone = dead()
    left = [
        run.path / named(gone, "result.json"),
        run.path / "checkpoints" / named(gone, "last.ckpt"),
        run.path / "exports" / named(gone, "onnx"),
    ]
    for path in left:
        path.parent.mkdir(exist_ok=True)
        path.write_text("half")
    rundir.open_run(run.path, "run")
    assert not any(path.exists() for path in left)
    left[0].write_text("half")
    with run.locked():
        assert not left[0].exists()
    (tmp_path / named(gone, "latest")).symlink_to(run.path)
    rundir.point_latest(tmp_path, run.path)
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".tmp-")]


CREATE = """
import os, signal, sys
from pathlib import Path
from lathe.runs.rundir import create
left, real = int(sys.argv[2]), (os.fsync, os.replace)
def dying(function):
    def call(*arguments):
        global left
        left -= 1
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments)
    return call
os.fsync, os.replace = map(dying, real)
create(Path(sys.argv[1]), {"name": "train", "paths": {}}, [])
"""


@pytest.mark.parametrize("moment", [1, 7])
def test_a_kill_leaves_a_whole_run_directory_or_none(tmp_path: Path, moment: int) -> None:
    killed = subprocess.run([sys.executable, "-c", CREATE, str(tmp_path), str(moment)], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert find_runs(tmp_path, "train") == []
    assert len(list((tmp_path / "train").iterdir())) == 1
    cfg = new_run(tmp_path)
    assert [str(path) for path in (tmp_path / "train").iterdir()] == [cfg["paths"]["run_dir"]]


def stand(path: Path, kind: str, text: str) -> None:
    """Make a file, a folder with a file, or a link to a file with this text."""
    if kind == "folder":
        path.mkdir()
        (path / "inside").write_text(text)
    elif kind == "link":
        (path.parent / f"target-{text}").write_text(text)
        path.symlink_to(f"target-{text}")
    else:
        path.write_text(text)


def read(path: Path) -> str:
    return (path / "inside" if path.is_dir() else path).read_text()


@pytest.mark.parametrize("old", ["file", "folder", "link"])
@pytest.mark.parametrize("new", ["file", "folder", "link"])
def test_a_write_replaces_anything(tmp_path: Path, new: str, old: str) -> None:
    place = tmp_path / "place"
    stand(place, old, "old")
    with files.whole(place, replace_folder=True) as temporary:
        stand(temporary, new, "new")
        assert read(place) == "old"
    assert read(place) == "new"
    assert place.is_symlink() == (new == "link")
    assert {name for name in os.listdir(tmp_path) if not name.startswith("target-")} == {"place"}


@pytest.mark.parametrize("new", ["file", "folder"])
def test_a_folder_stays_unless_it_may_be_replaced(tmp_path: Path, new: str) -> None:
    place = tmp_path / "place"
    stand(place, "folder", "old")
    message = r"place'$" if new == "folder" else "place is a folder, where a plain file belongs: move it away"
    with pytest.raises(OSError, match=message) as caught, files.whole(place) as temporary:
        stand(temporary, new, "new")
    assert new != "folder" or caught.value.errno in (errno.ENOTEMPTY, errno.EEXIST)
    assert read(place) == "old"
    assert {name for name in os.listdir(tmp_path) if not name.startswith("target-")} == {"place"}


@pytest.mark.parametrize("kind", ["pipe", "link to a pipe"])
def test_pipes_stay(tmp_path: Path, kind: str) -> None:
    place, pipe = tmp_path / "place", tmp_path / "pipe"
    os.mkfifo(pipe if "link" in kind else place)
    if "link" in kind:
        place.symlink_to(pipe)
    before = os.lstat(place)
    with pytest.raises(OSError, match="a plain file belongs") as caught:
        files.write_atomically(place, "new")
    assert str(disk_sentence(caught.value)).startswith(f"{place} is a ")
    assert (os.lstat(place).st_ino, os.lstat(place).st_mode) == (before.st_ino, before.st_mode)


def test_after_an_error_the_old_folder_is_there_and_named(tmp_path: Path) -> None:
    place = tmp_path / "place"
    stand(place, "folder", "old")

    def half() -> None:
        with files.whole(place, replace_folder=True) as temporary:
            stand(temporary, "folder", "half")
            raise OSError(errno.ENOSPC, "full", str(temporary / "inside"))

    with pytest.raises(OSError, match="full") as caught:
        half()
    assert caught.value.filename == str(place / "inside")
    assert read(place) == "old"
    assert os.listdir(tmp_path) == ["place"]


def test_disk_sentences() -> None:
    assert str(disk_sentence(OSError(errno.ENOSPC, "x", "/a/b"))).startswith("/a/b: the disk is full")
    assert "read-only file system: choose another place" in str(disk_sentence(OSError(errno.EROFS, "x", "/a/b")))
    assert disk_sentence(FileNotFoundError(errno.ENOENT, "x", "/proc/x")) is not None
    for bug in (FileNotFoundError(errno.ENOENT, "x", "/a/b"), OSError(errno.EIO, "x", "/a/b")):
        assert disk_sentence(bug) is None


def test_a_link_named_by_the_user_is_followed(tmp_path: Path) -> None:
    (tmp_path / "kept.txt").write_text("old")
    (tmp_path / "link.txt").symlink_to("kept.txt")
    write_atomically(followed(tmp_path / "link.txt"), "new")
    assert (tmp_path / "link.txt").is_symlink()
    assert (tmp_path / "kept.txt").read_text() == "new"
    write_atomically(tmp_path / "link.txt", "mine")  # as in a run directory
    assert not (tmp_path / "link.txt").is_symlink()
    assert (tmp_path / "kept.txt").read_text() == "new"
