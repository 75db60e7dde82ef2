"""scripts/runs.py: tagging, moving and deleting runs."""

import json
import shutil
import time
from pathlib import Path

import pytest
import yaml
from support.commands import check, command, environment, run, start
from support.run_folders import Cli, edit, refused, run_dirs
from support.runs import SMALL

from lathe.runs.rundir import RunDir
from lathe.verbs.runs.listed import Listed


def test_tags_are_where_a_continued_run_and_a_report_look(
    logs: Path, cli: Cli, capfd: pytest.CaptureFixture[str]
) -> None:
    a, b, _ = run_dirs(logs)
    before = yaml.safe_load((a / "config.yaml").read_text())
    weights = (a / "checkpoints" / "last.ckpt").read_bytes()
    assert cli("runs=logs/digits", "tag=[kept,good]", "untag=[baseline]", script="scripts/runs.py") == (0, "")
    assert yaml.safe_load((a / "config.yaml").read_text()) == {**before, "tags": ["kept", "good"]}
    assert RunDir(a).result["tags"] == ["kept", "good"]
    assert RunDir(b).config["tags"] == ["kept", "good"]
    assert not (b / "result.json").exists()
    assert (a / "checkpoints" / "last.ckpt").read_bytes() == weights
    assert cli("runs=logs/digits", "untag=[kept,good]", script="scripts/runs.py") == (0, "")
    assert "tags" not in RunDir(a).result
    assert RunDir(a).config["tags"] == []


def test_an_archived_run_is_a_run_directory_and_latest_leads_on(logs: Path, tmp_path: Path) -> None:
    b, c = run_dirs(logs)[1:]
    (logs / "sweeps" / "s" / "jobs").mkdir(parents=True)
    (logs / "sweeps" / "s" / "sweep.yaml").write_text("format: 1\n")
    job = logs / "sweeps" / "s" / "jobs" / "00000.json"
    job.write_text(json.dumps({"number": 0, "state": "complete", "run_dir": str(c), "overrides": []}))
    check(run("runs=[logs/latest]", "archive=old", cwd=tmp_path, script="scripts/runs.py"))
    moved = tmp_path / "old" / "other" / c.name
    assert json.loads(job.read_text())["run_dir"] == str(moved)
    assert not (logs / "other").exists()
    assert (logs / "latest").resolve() == b
    printed = check(run(f"run=old/other/{c.name}", cwd=tmp_path, script="scripts/evaluate.py")).stdout
    assert "test/accuracy" in printed
    rows = check(run("runs=old", cwd=tmp_path, script="scripts/runs.py")).stdout.splitlines()
    assert rows[1].split()[:2] == [f"old/other/{c.name}", "pruned"]
    done = run("runs=logs/sweeps/s", "archive=old", cwd=tmp_path, script="scripts/runs.py")
    assert "is not below paths.log_dir=" in done.stderr


def test_deleting_removes_what_is_shown_and_nothing_else(logs: Path, cli: Cli, tmp_path: Path) -> None:
    a, b, c = run_dirs(logs)
    outside = tmp_path / "outside"
    shutil.copytree(b, outside / "2026-11-20_13-00-00_dddddd")
    (logs / "linked").symlink_to(outside)
    (logs / "digits" / "link").symlink_to(outside / "2026-11-20_13-00-00_dddddd")
    (b / "data").symlink_to(outside)
    assert cli("delete=unfinished", "yes=true", script="scripts/runs.py") == (0, "")
    assert [a.is_dir(), b.exists(), c.is_dir()] == [True, False, True]
    assert (outside / "2026-11-20_13-00-00_dddddd" / "config.yaml").is_file()
    assert [path.name for path in (logs / "digits").iterdir()] in (["link", a.name], [a.name, "link"])
    said = refused(cli, "runs=outside", "delete=unfinished", "yes=true")
    assert "is not below paths.log_dir=" in said
    assert cli("runs=logs/other", "delete=pruned", "yes=true", script="scripts/runs.py") == (0, "")
    assert not (logs / "other").exists()
    assert (logs / "latest").resolve() == a


def test_a_run_that_another_needs_to_go_on_stays(logs: Path, cli: Cli) -> None:
    a, b, c = run_dirs(logs)
    edit(b, "config.yaml", ckpt_path=str(c))
    for words in (["archive=old"], ["delete=pruned", "yes=true"]):
        said = refused(cli, "runs=logs/other", *words)
        assert (
            said
            == f"logs/other/{c.name} is needed by logs/digits/{b.name}, which names it and is not complete: "
            + ("leave it there.")
        )
    assert c.is_dir()
    assert cli("runs=logs", "archive=old", script="scripts/runs.py") == (0, "")  # both are moved
    assert [path.is_dir() for path in (a, b, c)] == [False] * 3


def test_a_running_run_is_never_touched(tmp_path: Path) -> None:
    """A real run, which is training at the time."""
    words = [*SMALL, "trainer.max_epochs=100000", "name=long"]
    process = start(command(*words), tmp_path, environment())
    try:
        deadline = time.monotonic() + 60
        while not list(tmp_path.glob("logs/long/*/metrics.csv")):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.2)
        (there,) = [path.parent for path in tmp_path.glob("logs/long/*/config.yaml")]
        rows = check(run(cwd=tmp_path, script="scripts/runs.py")).stdout.splitlines()
        assert rows[1].split()[:2] == [f"logs/long/{there.name}", "running"]
        done = check(run("delete=unfinished", "yes=true", cwd=tmp_path, script="scripts/runs.py"))
        assert done.stdout == "None of 1 run is unfinished: nothing was removed.\n"
        for words in (["archive=old"], ["tag=[x]"]):
            done = run("runs=logs", *words, cwd=tmp_path, script="scripts/runs.py")
            assert done.returncode == 1
            assert done.stderr.startswith(f"Error: logs/long/{there.name} is running: leave it out")
        assert process.poll() is None
    finally:
        process.kill()
        process.communicate()
    assert Listed(there).state == "unfinished"
    check(run("delete=unfinished", "yes=true", cwd=tmp_path, script="scripts/runs.py"))
    assert not (tmp_path / "logs" / "long").exists()
