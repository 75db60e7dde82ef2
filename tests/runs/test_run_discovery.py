"""Runs below a folder, however it is named."""

import os
import random
from pathlib import Path

import pytest
from support.run_directories import write_run, write_sweep

from lathe.config.resolve import with_absolute_paths
from lathe.runs.run_discovery import is_run, jobs_by_run, runs_below
from lathe.runs.rundir import open_run
from lathe.verbs.runs.reader import find_runs


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def tree(log_dir: Path, rng: random.Random) -> None:
    """Runs of two names, some of them jobs of sweeps, and links, hidden folders and other files."""
    runs = [
        write_run(log_dir, number, rng.choice([0.9, None]), [f"name={rng.choice(['a', 'b'])}"])
        for number in range(rng.randrange(1, 5))
    ]
    for number in range(rng.randrange(3)):
        jobs = [
            {"run_dir": str(run), "state": rng.choice(["complete", "failed"])} for run in runs if rng.random() < 0.5
        ]
        jobs += [{"state": "failed", "sentence": "no memory"}] * rng.randrange(2)
        write_sweep(log_dir, jobs, f"2026-11-23_10-00-0{number}_abc123")
    (log_dir / "latest").symlink_to(rng.choice(runs))
    (log_dir / "round").symlink_to(log_dir)
    (log_dir / "a" / ".tmp-here").mkdir(parents=True, exist_ok=True)
    (log_dir / "a" / "notes.txt").touch()
    (log_dir / "report").mkdir()


@pytest.mark.parametrize("seed", range(4))
def test_runs_and_failed_jobs_are_found_once(tmp_path: Path, seed: int) -> None:
    log_dir = tmp_path / "logs"
    tree(log_dir, random.Random(seed))
    there = sorted(path.parent for path in log_dir.glob("[ab]/*/config.yaml"))
    failed = sorted(log_dir.glob("sweeps/*/jobs/*.json"))
    failed = [path for path in failed if '"run_dir": null' in path.read_text()]
    for named in (None, "logs"):
        found = find_runs(named, log_dir)
        assert sorted(run.path for run in found if run.path) == there
        assert sorted(Path(run.where).absolute() for run in found if run.path is None) == failed
    for name in {path.parent.name for path in there}:
        own = [path for path in there if path.parent.name == name]
        assert [run.path for run in find_runs([f"logs/{name}"])] == own


def test_a_run_that_failed_as_a_job_has_failed_for_every_path(tmp_path: Path) -> None:
    run = write_run(tmp_path / "logs", 0)
    os.utime(run, (0, 0))
    write_sweep(tmp_path / "logs", [{"run_dir": str(run), "state": "failed", "sentence": "the loss is not finite"}])
    for words in ("logs", "logs/train", "logs/sweeps", str(run)):
        (found,) = find_runs(words)
        assert (found.path, found.state, found.sentence) == (run, "failed", "the loss is not finite")


def test_runs_that_moved_with_their_sweep_are_found(tmp_path: Path) -> None:
    run = write_run(tmp_path / "before", 0, 0.9)
    write_sweep(tmp_path / "before", [{"run_dir": str(run)}])
    (tmp_path / "before").rename(tmp_path / "after")
    moved = tmp_path / "after" / "train" / run.name
    assert list(jobs_by_run(tmp_path / "after")) == [moved]
    (listed,) = find_runs("after/sweeps", tmp_path / "after")
    assert listed.path == moved
    assert [place.path for place in runs_below(tmp_path / "after", skipped=("sweeps",))] == [moved]
    assert is_run(moved)


def test_the_folder_of_a_name_is_its_newest_run(tmp_path: Path) -> None:
    for number, day in enumerate(("2026-01-02_00-00-00_aaaaaa", "2026-01-01_23-00-00_bbbbbb")):  # in two time zones
        newest = write_run(tmp_path / "logs", number, 0.9, ["name=a"]).rename(tmp_path / "logs" / "a" / day)
        os.utime(newest / "environment.json", (number, number))
    assert open_run("logs/a", "run").path == newest
    kept = with_absolute_paths({"ckpt_path": "logs/a", "compression": {"distill": {"teacher": ["logs/a"]}}})
    assert (kept["ckpt_path"], kept["compression"]["distill"]["teacher"]) == (str(newest), [str(newest)])
