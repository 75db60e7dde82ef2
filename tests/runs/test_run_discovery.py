"""Runs below a folder, however it is named, and their status, whatever happened to the files."""

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from support.run_directories import write_run, write_sweep
from support.run_folders import Cli, refused

from lathe.config.resolve import with_absolute_paths
from lathe.runs.run_discovery import is_run, jobs_by_run, runs_below
from lathe.runs.rundir import open_run
from lathe.verbs.runs.command import show_list
from lathe.verbs.runs.reader import find_runs


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def log_dir(tmp_path: Path) -> Path:
    return tmp_path / "logs"


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


@pytest.mark.parametrize("seed", range(2))
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


# Status


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


MUTATIONS: dict[str, Callable[[Path], object]] = {  # others are in tests/hostile
    "empty": lambda path: path.write_bytes(b""),
    "cut": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "list": lambda path: path.write_text("[1, {a: 2}]"),
    "fifo": fifo,
    "missing": Path.unlink,
}
FILES = ("config.yaml", "overrides.yaml", "result.json")


@pytest.mark.parametrize("mutation", MUTATIONS)
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_is_reported(log_dir: Path, name: str, mutation: str) -> None:
    path = write_run(log_dir, 0, 0.9)
    (path / "checkpoints").mkdir()
    MUTATIONS[mutation](path / name)
    (listed,) = find_runs(None, log_dir)
    assert listed.size > 0
    if (name, mutation) == ("overrides.yaml", "missing"):
        expected = "complete"
    elif (name, mutation) == ("result.json", "missing"):
        expected = "unfinished"
    elif (name, mutation) == ("overrides.yaml", "cut"):
        expected = listed.state  # half a list may be a list
    else:
        expected = "failed"
        assert listed.status.unread == listed.sentence
        assert f"its {name} " in str(listed.sentence)
        assert str(listed.sentence).endswith(".")
    assert listed.state == expected


def test_a_run_that_can_not_be_read_is_listed_and_not_changed(log_dir: Path, cli: Cli) -> None:
    torn, other = (write_run(log_dir, number, None) for number in range(2))
    (torn / "config.yaml").write_text("name: [")
    sentence = f"logs/train/{torn.name}: its config.yaml can't be read as a configuration."
    request = dict.fromkeys(("columns", "limit", "runs")) | {"paths": {"log_dir": log_dir}, "sort": "date"}
    show_list({**request, "output": "list.json"}, find_runs(None, log_dir))
    rows = json.loads(Path("list.json").read_text())
    assert [(row["state"], row["sentence"]) for row in rows] == [("failed", sentence), ("unfinished", None)]
    assert refused(cli, "runs=logs", "tag=[x]") == sentence
    assert "tags: []" in (other / "config.yaml").read_text()
    assert cli("delete=failed", "yes=true", script="scripts/runs.py") == (0, "")
    assert cli("delete=unfinished", "yes=true", script="scripts/runs.py") == (0, "")
    assert [torn.is_dir(), other.exists()] == [True, False]


def test_failed_jobs_are_listed_without_their_directories(log_dir: Path) -> None:
    runs = [write_run(log_dir, number, 0.9) for number in range(4)]
    states = ("complete", "failed", "failed", "complete")
    jobs = [{"run_dir": str(run), "state": state} for run, state in zip(runs, states, strict=True)]
    sweep = write_sweep(log_dir, [*jobs, {"state": "running"}])
    for path in runs[1:]:
        shutil.rmtree(path)
    for words in (None, str(sweep), "logs"):
        found = find_runs(words, log_dir)
        assert sorted(run.state for run in found) == ["complete", "failed", "failed", "gone", "running"]
        assert [run.path for run in found if run.path] == [runs[0]]
    assert len(find_runs(["logs", str(sweep), "logs"])) == 5  # no job twice, however it is named


@pytest.mark.parametrize("named", ["logs/mystuff", "", "\0"])
def test_a_job_that_names_no_run_directory_has_none(log_dir: Path, named: str) -> None:
    own = write_run(log_dir, 0, 0.9)
    (log_dir / "mystuff").mkdir()
    (log_dir / "mystuff" / "thesis.tex").write_text("x" * 1000)
    sweep = write_sweep(log_dir, [{"run_dir": named, "state": "complete", "sentence": None}])
    for words in (None, str(sweep)):
        (listed,) = (one for one in find_runs(words, log_dir) if one.path != own)
        assert (listed.path, listed.state, listed.size) == (None, "failed", 0)
        assert listed.sentence == f"it names {named!r}, which is not a run directory."
