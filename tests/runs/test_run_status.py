"""Status of runs, whatever happened to the files."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from support.run_directories import write_run, write_sweep
from support.run_folders import Cli, refused

from lathe.verbs.runs.command import show_list
from lathe.verbs.runs.reader import find_runs


def cut(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


MUTATIONS: dict[str, Callable[[Path], object]] = {
    "empty": lambda path: path.write_bytes(b""),
    "cut": cut,
    "binary": lambda path: path.write_bytes(bytes(range(256))),
    "list": lambda path: path.write_text("[1, {a: 2}]"),
    "mapping": lambda path: path.write_text("{}"),
    "python": lambda path: path.write_text('!!python/object/apply:os.system ["touch canary"]'),
    "deep": lambda path: path.write_text("[" * 5000 + "]" * 5000),
    "folder": folder,
    "fifo": fifo,
    "missing": Path.unlink,
}
FILES = ("config.yaml", "overrides.yaml", "result.json")


@pytest.fixture
def log_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path / "logs"


@pytest.mark.parametrize("mutation", MUTATIONS)
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_is_reported(log_dir: Path, name: str, mutation: str) -> None:
    path = write_run(log_dir, 0, 0.9)
    (path / "checkpoints").mkdir()
    MUTATIONS[mutation](path / name)
    (listed,) = find_runs(None, log_dir)
    assert listed.size > 0
    says_nothing = (("overrides.yaml", "missing"), ("result.json", "mapping"))
    if (name, mutation) in says_nothing:
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
    assert not Path("canary").exists()


def test_the_list_names_runs_that_can_not_be_read(log_dir: Path) -> None:
    runs = [write_run(log_dir, number, 0.9) for number in range(3)]
    (runs[0] / "config.yaml").write_bytes(b"\0")
    request = dict.fromkeys(("columns", "limit", "output", "runs")) | {"paths": {"log_dir": log_dir}, "sort": "date"}
    show_list({**request, "output": "list.json"}, find_runs(None, log_dir))
    found = json.loads(Path("list.json").read_text())
    reason = f"logs/train/{runs[0].name}: its config.yaml can't be read as a configuration."
    assert [row["state"] for row in found] == ["failed", *["complete"] * 2]
    assert [row["sentence"] for row in found] == [reason, *[None] * 2]


def test_a_run_that_can_not_be_read_is_not_changed(log_dir: Path, cli: Cli) -> None:
    torn, other = (write_run(log_dir, number, None) for number in range(2))
    (torn / "config.yaml").write_text("name: [")
    sentence = f"logs/train/{torn.name}: its config.yaml can't be read as a configuration."
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


@pytest.mark.parametrize("named", ["/", "logs/mystuff", "", "logs/train", "\0"])
def test_a_job_that_names_no_run_directory_has_none(log_dir: Path, named: str) -> None:
    own = write_run(log_dir, 0, 0.9)
    (log_dir / "mystuff").mkdir()
    (log_dir / "mystuff" / "thesis.tex").write_text("x" * 1000)
    sweep = write_sweep(log_dir, [{"run_dir": named, "state": "complete", "sentence": None}])
    for words in (None, str(sweep)):
        (listed,) = (one for one in find_runs(words, log_dir) if one.path != own)
        assert (listed.path, listed.state, listed.size) == (None, "failed", 0)
        assert listed.sentence == f"it names {named!r}, which is not a run directory."
