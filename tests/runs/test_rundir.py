"""Run directories: never shared, locked, found again, and never half-written."""

import errno
import json
import multiprocessing
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from lathe.errors import UserError
from lathe.runs import rundir
from lathe.runs.run_discovery import find_launch, find_runs, find_same
from lathe.runs.rundir import RunDir, create, open_run


def cfg(name: str = "train", **extra: Any) -> dict[str, Any]:
    groups: dict[str, Any] = {group: {} for group in rundir.GROUPS}
    own = {"name": name, "seed": 1, "paths": {"run_dir": None}, "resume": None, "launch": {"max_restarts": 0}}
    return {**groups, **own, **extra}


def new(log_dir: Path, launch_id: str | None = None, **extra: Any) -> RunDir:
    return create(log_dir, cfg(**extra), ["seed=1"], launch_id)


def make_many(log_dir: str) -> list[str]:
    return [new(Path(log_dir)).path.name for _ in range(10)]


def test_changed_files_of_the_user_are_warned_about(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rundir, "SOURCE", tmp_path / "src")
    for name in ("mine/lit.py", "mine/same.py", "mine/gone.py", "lathe/ours.py"):
        (tmp_path / "src" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "src" / name).write_text("x = 1\n")
    run = new(tmp_path / "logs")
    run.warn_of_changes()  # a warning would fail the test
    (tmp_path / "src/mine/lit.py").write_text("x = 2\n")
    (tmp_path / "src/mine/gone.py").unlink()
    for name in ("mine/fresh.py", "lathe/ours.py"):
        (tmp_path / "src" / name).write_text("x = 3\n")
    with pytest.warns(UserWarning, match=r"changed since this run began: src/mine/gone\.py, src/mine/lit\.py\.$"):
        run.warn_of_changes()


def test_a_new_directory_has_config_overrides_and_environment(tmp_path: Path) -> None:
    config = cfg(value=0.1)
    run = create(tmp_path, config, ["value=0.1", "+x=2"], "torchrun:7")
    assert run.path.parent == tmp_path / "train"
    assert config["paths"]["run_dir"] == str(run.path)
    assert run.config == config
    assert (run.path / "overrides.yaml").read_text() == "- value=0.1\n- +x=2\n"
    assert sorted(file.name for file in run.path.iterdir()) == ["config.yaml", "environment.json", "overrides.yaml"]
    facts = run.environment
    assert facts["launch_id"] == "torchrun:7"
    assert facts["command"] == sys.argv
    assert facts["python"].startswith(f"{sys.version_info.major}.{sys.version_info.minor}.")
    assert facts["packages"].keys() >= {"torch", "lightning", "hydra-core"}
    assert facts["git_commit"] is None or len(facts["git_commit"]) == 40
    assert not run.complete
    assert not run.begun


def test_a_folder_of_runs_is_its_newest_run_with_a_checkpoint(tmp_path: Path) -> None:
    first, second = new(tmp_path), new(tmp_path)
    os.utime(first.path / "environment.json", (1, 1))
    assert open_run(tmp_path / "train", "run").path == second.path
    first.best.parent.mkdir()
    first.best.touch()
    assert open_run(tmp_path / "train", "run").path == first.path
    assert open_run(tmp_path / "train", "resume").path == second.path


def test_processes_at_once_get_different_directories(tmp_path: Path) -> None:
    with multiprocessing.get_context("fork").Pool(3) as pool:
        names = [name for many in pool.map(make_many, [str(tmp_path)] * 3) for name in many]
    assert len(set(names)) == 30
    assert len(find_runs(tmp_path, "train")) == 30


def test_a_full_disk_is_reported_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, text: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(rundir, "write_atomically", full)
    with pytest.raises(UserError, match=r"config\.yaml: the disk is full: free some space"):
        new(tmp_path)
    assert list(tmp_path.rglob("*.yaml")) == []
    assert list(tmp_path.glob("train/*")) == []


def test_a_result_makes_a_run_complete_and_reopening_undoes_it(tmp_path: Path) -> None:
    run = new(tmp_path)
    result = {"steps": 3, "seconds": 1.5, "test/accuracy": 0.1 + 0.2, "objective": None}
    run.finish(result)
    assert run.complete
    assert run.result == result
    with run.reopened({**run.config, "seed": 2}):
        pass
    assert not run.complete
    assert run.config["seed"] == 2


def test_what_is_not_a_run_directory_is_refused(tmp_path: Path) -> None:
    for text in ("a: 1\n", "a: [1", "- 1\n", "name: a\n"):  # of another program, or damaged
        (tmp_path / "config.yaml").write_text(text)
        with pytest.raises(UserError, match=r"^run=.* is not a run directory"):
            open_run(tmp_path, "run")
    run = new(tmp_path)
    for text in ("a: [1", "- 1\n", "name: a\n"):
        (run.path / "config.yaml").write_text(text)
        with pytest.raises(UserError, match=r"its config\.yaml (can't be read as a configuration|has no .*paths)"):
            open_run(run.path, "run")


def test_a_missing_checkpoint_is_named_with_those_that_exist(tmp_path: Path) -> None:
    run = new(tmp_path)
    with pytest.raises(UserError, match="has no checkpoint 'best': it has none at all"):
        run.checkpoint("best")
    run.last.parent.mkdir()
    run.last.write_bytes(b"")
    with pytest.raises(UserError, match=r"has no checkpoint 'best': it has last; checkpoint=last takes that\.$"):
        run.checkpoint("best", "checkpoint")
    assert run.checkpoint("last") == run.last


def test_removing_a_run_removes_its_empty_parent_and_a_kill_leaves_no_part_under_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*words: Any, **more: Any) -> None:
        raise KeyboardInterrupt

    one, two, three = new(tmp_path), new(tmp_path), new(tmp_path / "other")
    one.remove()
    assert list(tmp_path.glob("train/*")) == [two.path]
    three.remove()
    assert list((tmp_path / "other").iterdir()) == []
    monkeypatch.setattr("shutil.rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        two.remove()
    (left,) = (tmp_path / "train").iterdir()
    assert left.name.startswith(".tmp-")  # the next process removes it


def hold(path: Path, ready: Any) -> None:
    with RunDir(path).locked():
        ready.set()
        time.sleep(60)


def test_a_lock_ends_with_its_process(tmp_path: Path) -> None:
    run, fork = new(tmp_path), multiprocessing.get_context("fork")
    assert not run.busy
    ready = fork.Event()
    holder = fork.Process(target=hold, args=(run.path, ready))
    holder.start()
    try:
        assert ready.wait(60)
        assert run.busy
        with pytest.raises(UserError, match=r"is being written to by another process"), run.locked():
            pass
        with pytest.raises(UserError, match=r"^resume=auto: another process is at "):
            find_same(tmp_path, run.config)
    finally:
        holder.kill()
        holder.join()
    with run.locked():
        assert run.busy
    assert getattr(find_same(tmp_path, run.config), "path", None) == run.path


def test_runs_are_found_newest_first(tmp_path: Path) -> None:
    begun = {  # named by three machines of different time zones
        "2026-01-02_05-00-00_ff": "2026-01-01T20:00:00+00:00",
        "2026-01-01_22-00-00_aa": "2026-01-01T22:00:00+00:00",
        "2026-01-01_23-30-00_00": "2026-01-01T21:30:00+00:00",
    }
    for name, started in begun.items():
        (tmp_path / "train" / name).mkdir(parents=True)
        (tmp_path / "train" / name / "config.yaml").write_text("{}")
        (tmp_path / "train" / name / "environment.json").write_text(json.dumps({"started": started}))
    (tmp_path / "train" / "mine").mkdir()
    assert [run.path.name[-2:] for run in find_runs(tmp_path, "train")] == ["aa", "00", "ff"]
    assert find_runs(tmp_path, "other") == []


def place(log_dir: Path, stamp: str, **extra: Any) -> RunDir:
    """Create a run under the name `stamp`."""
    run = new(log_dir, **extra)
    path = run.path.with_name(stamp)
    run.path.rename(path)
    return RunDir(path)


def test_auto_finds_the_newest_unfinished_run_of_the_same_experiment(tmp_path: Path) -> None:
    oldest, middle = place(tmp_path, "1"), place(tmp_path, "2")
    place(tmp_path, "3", seed=2)
    place(tmp_path, "4").finish({})
    (place(tmp_path, "5").path / "config.yaml").write_text("{ torn")
    wanted = cfg(resume="auto", launch={"max_restarts": 3}, paths={"run_dir": None, "log_dir": "other"})
    for run in (middle, oldest):
        assert getattr(find_same(tmp_path, wanted), "path", None) == run.path
        run.finish({})
    assert find_same(tmp_path, cfg(seed=3)) is None


def test_a_launch_finds_its_own_run(tmp_path: Path) -> None:
    place(tmp_path, "1", launch_id="torchrun:1")
    mine = place(tmp_path, "2", launch_id="torchrun:7")
    assert getattr(find_launch(tmp_path, "train", "torchrun:7"), "path", None) == mine.path
    mine.finish({})
    assert find_launch(tmp_path, "train", "torchrun:7") is None
