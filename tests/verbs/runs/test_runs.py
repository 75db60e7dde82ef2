"""scripts/runs.py: listing, filtering, comparing, tagging, moving and deleting runs."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.commands import in_process
from support.run_folders import Cli, edit, refused, run_dirs
from support.runs import SMALL

from lathe.runs.rundir import RunDir
from lathe.verbs.runs.command import OPTIONS
from lathe.verbs.runs.reader import find_runs


def listed(cli: Cli, *words: str) -> list[dict[str, Any]]:
    code, error = cli(*words, "output=list.json", script="scripts/runs.py")
    assert (code, error) == (0, "")
    return list(json.loads(Path("list.json").read_text()))


def test_a_row_says_what_a_run_is(logs: Path, cli: Cli) -> None:
    a, b, c = listed(cli)
    assert a["run"] == "logs/digits/2026-11-20_10-00-00_aaaaaa"
    assert (a["name"], a["date"], a["state"]) == ("digits", "2026-11-20 10:00:00", "complete")
    result = RunDir(run_dirs(logs)[0]).result
    assert (a["metric"], a["objective"]) == ("val/accuracy", result["val/accuracy"])
    assert (a["steps"], a["seed"], a["tags"]) == (40, 42, ["baseline"])
    assert a["typed"] == [*SMALL, "name=digits", "tags=[baseline]"]
    assert a["size"] == sum(path.stat().st_size for path in run_dirs(logs)[0].rglob("*") if path.is_file())
    assert (b["state"], b["objective"], b["steps"], b["seed"], b["tags"]) == ("unfinished", None, 40, 7, [])
    assert (c["state"], c["objective"], c["name"]) == ("pruned", 0.25, "other")


def test_runs_are_chosen_and_ordered(logs: Path, cli: Cli) -> None:
    for word, expected in {
        "where=[state=complete]": "a",
        "where=name=digits": "ab",
        "where=[name=dig*,optimizer.lr=2e-1]": "b",
        "where=[tags=baseline]": "ac",
        "where=[test/accuracy>0.2]": "a",
        "where=[objective<=0.25]": "c",
        "where=[seed>=7,seed<42]": "b",
        "since=2026-11-20T10:30": "bc",
        "runs=[logs/latest,logs/*/2026-11-20_10*]": "ac",
        "sort=-date": "cba",
        "sort=-objective": "bac",  # b has none
        "sort=optimizer.lr": "acb",
    }.items():
        assert "".join(row["run"][-1] for row in listed(cli, word)) == expected, word


def test_a_mistake_costs_a_sentence_and_changes_nothing(logs: Path, cli: Cli) -> None:
    before = {path: path.read_bytes() for path in logs.rglob("*") if path.is_file() and path.name != ".lock"}
    for word, sentence in {
        "where=[optimizer.lrr=1]": "where=optimizer.lrr=1: none of these 3 runs has optimizer.lrr",
        "tag=[x]": "tag would be for every run below logs",
        "delete=complete": "delete would be for every run below logs",
        "delete=unfinished": "delete=unfinished asks before it removes 1 unfinished run, ",
    }.items():
        assert refused(cli, word).startswith(sentence)
    code, errors = cli("runs=logs", "where=[ab=1]", "columns=[cd]", "sort=ef", script="scripts/runs.py")
    assert code == 1
    assert all(f"{option}: none of these 3 runs has" in errors for option in ("where=ab=1", "columns=[cd]", "sort=ef"))
    after = {path: path.read_bytes() for path in logs.rglob("*") if path.is_file() and path.name != ".lock"}
    assert after == before


def test_two_runs_are_compared(logs: Path, cli: Cli) -> None:
    a, b, c = (str(path.relative_to(logs.parent)) for path in run_dirs(logs))
    assert cli(f"compare=[{a},{c}]", "points=2", "output=c.json", script="scripts/runs.py")[0] == 0
    found = json.loads(Path("c.json").read_text())
    assert found["configuration"] == {}
    result = RunDir(Path(a)).result
    assert found["metrics"]["test/accuracy"] == [result["test/accuracy"], 0.125]
    assert [point[0] for point in found["curves"]["train/loss"]] == [5, 40]
    assert all(mine == theirs for _, mine, theirs in found["curves"]["train/loss"])
    environment = {**RunDir(Path(b)).environment, "python": "3.9.1", "git_diff": "+x\n+y"}
    (Path(b) / "environment.json").write_text(json.dumps(environment))
    assert cli(f"compare=[{a},{b}]", "output=c.json", script="scripts/runs.py")[0] == 0
    found = json.loads(Path("c.json").read_text())
    assert found["configuration"] == {"optimizer.lr": [0.1, 0.2], "seed": [42, 7], "tags": [["baseline"], []]}
    assert found["environment"]["python"][1] == "3.9.1"
    assert found["environment"]["uncommitted diff"][1].startswith("2 lines, ")
    assert found["complete"] == [True, False]


def test_what_measures_different_things_is_not_subtracted(logs: Path, cli: Cli) -> None:
    """Components that a saved configuration may not build can be compared: nothing is built."""
    a, _, c = run_dirs(logs)
    config = yaml.safe_load((c / "config.yaml").read_text())
    config["task"]["class_weights"], config["model"]["net"]["_target_"] = [1.0] * 10, "elsewhere.Net"
    (c / "config.yaml").write_text(yaml.safe_dump(config))
    (c / "result.json").write_text(json.dumps({**RunDir(c).result, "monitor": "val/loss", "objective": 0.25}))
    assert cli(f"compare=[{a},{c}]", "output=c.json", script="scripts/runs.py") == (0, "")
    assert json.loads(Path("c.json").read_text())["apart"] == {
        "objective": "val/accuracy and val/loss",
        **dict.fromkeys(["train/loss", "val/loss", "test/loss"], "different task.class_weights"),
    }


def test_what_a_stranger_wrote_is_shown_and_not_obeyed(logs: Path, cli: Cli, capfd: pytest.CaptureFixture[str]) -> None:
    a, b, _ = run_dirs(logs)
    (b / "overrides.yaml").write_text('- "model=\\e[2Jx"\n- "m\\e[2Jx=1"\n')
    (a / "config.yaml").write_text("name: [torn")
    (a / "result.json").write_text("{")
    assert len(listed(cli)) == 3
    capfd.readouterr()
    assert in_process("scripts/runs.py") == 0
    printed = capfd.readouterr().out
    assert "?[2Jx" in printed.splitlines()[0]
    assert "?[2Jx" in printed.splitlines()[2]
    assert "\x1b" not in printed


def test_tags_are_where_a_continued_run_and_a_report_look(logs: Path, cli: Cli) -> None:
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


def test_an_archived_run_is_a_run_directory_and_latest_leads_on(logs: Path, cli: Cli, tmp_path: Path) -> None:
    b, c = run_dirs(logs)[1:]
    (logs / "sweeps" / "s" / "jobs").mkdir(parents=True)
    (logs / "sweeps" / "s" / "sweep.yaml").write_text("format: 1\n")
    job = logs / "sweeps" / "s" / "jobs" / "00000.json"
    job.write_text(json.dumps({"number": 0, "state": "complete", "run_dir": str(c), "overrides": []}))
    assert cli("runs=[logs/latest]", "archive=old", script="scripts/runs.py") == (0, "")
    moved = tmp_path / "old" / "other" / c.name
    assert json.loads(job.read_text())["run_dir"] == str(moved)
    assert not (logs / "other").exists()
    assert (logs / "latest").resolve() == b
    assert [(one.path, one.state) for one in find_runs("old")] == [(moved, "pruned")]


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
        assert said.startswith(f"logs/other/{c.name} is needed by logs/digits/{b.name}")
    assert c.is_dir()
    assert cli("runs=logs", "archive=old", script="scripts/runs.py") == (0, "")  # both are moved
    assert [path.is_dir() for path in (a, b, c)] == [False] * 3


def test_a_running_run_is_never_touched(logs: Path, cli: Cli) -> None:
    b = run_dirs(logs)[1]
    with RunDir(b).locked():
        assert [row["state"] for row in listed(cli)] == ["complete", "running", "pruned"]
        assert cli("delete=unfinished", "yes=true", script="scripts/runs.py") == (0, "")
        for words in (["archive=old"], ["tag=[x]"]):
            said = refused(cli, "runs=logs", *words)
            assert said.startswith(f"logs/digits/{b.name} is running: leave it out")
    assert b.is_dir()
    assert cli("delete=unfinished", "yes=true", script="scripts/runs.py") == (0, "")
    assert not b.exists()


def test_a_key_that_is_not_used_is_refused(logs: Path, cli: Cli) -> None:
    """Every key that applies to some commands, with each of the others."""
    odd = {"where": "[seed=1]", "since": "3d", "sort": "name", "limit": "1", "columns": "[seed]", "points": "3"}
    odd |= {"output": "x.json", "runs": "logs", "yes": "true"}
    for words in ((), ("compare=[a,b]",)):
        asked = "compare" if words else "the list"
        unused = [key for key, (_, actions) in OPTIONS.items() if asked not in actions]
        code, error = cli(*words, *(f"{key}={odd[key]}" for key in unused), script="scripts/runs.py")
        assert (code, [line.removeprefix("Error: ").split("=")[0] for line in error.splitlines()]) == (1, unused)
