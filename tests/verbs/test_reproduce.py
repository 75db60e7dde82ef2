"""Reproduction of a finished run with its recorded code, compared bit for bit."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.commands import check, environment
from support.runs import ROOT, SMALL, new_run, runs

from lathe.errors import UserError
from lathe.runs.rundir import RunDir
from lathe.training.train import train
from lathe.verbs.reproduce import Code, compare, comparison_text, recorded_code

Cli = Callable[..., tuple[int, str]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    cfg = new_run(tmp_path_factory.mktemp("made") / "logs", *SMALL, "name=digits", "seed=3")
    train(cfg)
    return Path(cfg["paths"]["run_dir"])


@pytest.fixture
def copy(made: Path, tmp_path: Path) -> RunDir:
    """A copy of the run, to be tampered with."""
    return RunDir(shutil.copytree(made, tmp_path / "logs" / "digits" / made.name))


def rewrite(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_a_run_is_made_again_in_a_process_of_its_own(made: Path, tmp_path: Path, cli: Cli) -> None:
    words = (f"run={made}", "code=current", "output=found.json")
    assert cli(*words, script="scripts/reproduce.py")[0] == 0
    (again,) = runs(tmp_path / "logs")
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["reproduced"] is True
    assert (found["run"], found["again"]) == (str(made), str(again))
    assert found["weights"] == {
        "best.ckpt": {"tensors": 4, "differ": 0, "largest": 0.0},
        "last.ckpt": {"tensors": 4, "differ": 0, "largest": 0.0},
    }
    assert (found["metrics"], found["first_difference"]) == ({}, None)
    new, old = RunDir(again), RunDir(made)
    assert new.result["test/accuracy"] == old.result["test/accuracy"]
    assert new.overrides == old.overrides
    kept = {key: value for key, value in old.config.items() if key not in ("paths", "launch")}
    assert {key: value for key, value in new.config.items() if key not in ("paths", "launch")} == kept
    assert new.config["paths"]["run_dir"] == str(again)


def test_what_differs_is_told(made: Path, copy: RunDir) -> None:
    state = torch.load(copy.last, weights_only=True)
    state["state_dict"]["head.weight"][0, 0] += 0.5
    torch.save(state, copy.last)
    rewrite(copy.path / "result.json", **{"test/accuracy": 0.5, "seconds": 99.0})
    lines = (copy.path / "metrics.csv").read_text().splitlines()
    head, cells = lines[0].split(","), lines[2].split(",")
    cells[head.index("train/loss")] = "9.5"
    (copy.path / "metrics.csv").write_text("\n".join([*lines[:2], ",".join(cells), *lines[3:]]) + "\n")
    rewrite(copy.path / "environment.json", python="3.9.1")
    (copy.path / "overrides.yaml").write_text("- trainer.max_epochs=1\n")
    found = compare(copy, RunDir(made), Code(ROOT, None, None, "as it is here"))
    assert found["reproduced"] is False
    assert found["weights"]["best.ckpt"]["differ"] == 0
    assert found["weights"]["last.ckpt"] == {"tensors": 4, "differ": 1, "largest": pytest.approx(0.5)}
    assert found["metrics"] == {"test/accuracy": (0.5, RunDir(made).result["test/accuracy"])}
    assert found["first_difference"]["step"] == int(cells[head.index("step")])
    assert found["first_difference"]["columns"]["train/loss"][0] == "9.5"
    assert list(found["environment"]) == ["python"]
    assert "trained further after its first end, trainer.max_epochs=1, which no single run does" in found["notes"][1]
    assert "last.ckpt    1 of 4 tensors differ, by at most 0.5\n" in comparison_text(found)


def test_what_can_not_be_made_again_is_refused(copy: RunDir, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*words: str) -> str:
        code, error = cli(f"run=logs/digits/{copy.path.name}", *words, script="scripts/reproduce.py")
        assert code == 1
        assert error.count("\n") == 1, error
        assert [path.name for path in Path("logs/digits").iterdir()] == [copy.path.name]
        return error.removeprefix(f"Error: run=logs/digits/{copy.path.name}").rstrip()

    rewrite(copy.path / "environment.json", git_commit="ab" * 20)
    assert "git fetch --all" in refused()
    with monkeypatch.context() as patch:  # before training starts
        patch.setattr("lathe.verbs.reproduce.begin", lambda *_: pytest.fail("too late"))
        best = copy.path / "checkpoints" / "best.ckpt"
        whole = best.read_bytes()
        best.write_bytes(whole[:5000])
        assert "best.ckpt can't be read as a checkpoint" in refused("code=current")
        best.write_bytes(whole)
    text = (copy.path / "config.yaml").read_text()
    (copy.path / "config.yaml").write_text(text.replace("ckpt_path: null", "ckpt_path: /nowhere/best.ckpt"))
    assert "ckpt_path=/nowhere/best.ckpt" in refused("code=current")
    (copy.path / "config.yaml").write_text(text)
    (copy.path / "result.json").unlink()
    assert "is not complete" in refused("code=current")


def git(folder: Path, *words: str) -> str:
    identity = ["-c", "user.name=x", "-c", "user.email=x@example.com"]
    done = subprocess.run(["git", *identity, *words], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A clone with a history of one commit."""
    folder = tmp_path / "project"
    for name in ("src", "configs", "scripts"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    shutil.copy(ROOT / "train.py", folder)
    (folder / ".gitignore").write_text("logs\n__pycache__\n")
    git(folder, "init", "-q")
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", "one")
    return folder


def typed(project: Path, script: str, *words: str) -> subprocess.CompletedProcess[str]:
    """A command in a separate Python, which finds only the clone's packages."""
    line = [sys.executable, str(project / script), *words]
    variables = environment(PYTHONPATH=str(project / "src"))
    return subprocess.run(line, cwd=project, env=variables, capture_output=True, text=True, timeout=300)


def test_an_error_of_the_repetition_is_not_replaced_by_one_of_the_clean_up(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def failing(problem: str, folder: Path, *arguments: str, **_: Any) -> str:
        calls.append(arguments[:2])
        if arguments[:2] in (("worktree", "remove"), ("worktree", "prune")):
            raise UserError(problem)
        return ""

    monkeypatch.setattr("lathe.verbs.reproduce._git", failing)
    with pytest.raises(ZeroDivisionError), recorded_code({"git_commit": "a" * 40}, "recorded", "run=x"):
        _ = 1 / 0
    assert calls[-2:] == [("worktree", "remove"), ("worktree", "prune")]


@pytest.mark.slow
def test_the_recorded_code_comes_back(project: Path) -> None:
    """A commit with a diff; the code has changed since, and would train differently. The run has two processes, is
    compressed and averaged.
    """
    net = project / "src" / "lathe" / "nets" / "mlp.py"
    before = net.read_text()
    net.write_text(
        before.replace("        return ", "        return 1.5 * ", 1) + "\n# a diff that was not committed\n\n"
    )
    assert net.read_text().count("1.5 * ") == 1
    words = (
        "compression=prune",
        "compression.receipt=none",
        "callbacks=[default,ema]",
        "trainer.limit_train_batches=5",
    )
    check(typed(project, "train.py", *SMALL, *words, "trainer.max_epochs=1", "trainer.devices=2", "strategy=ddp"))
    (made,) = runs(project / "logs")
    assert "+        return 1.5 * " in RunDir(made).environment["git_diff"]
    net.write_text(before)
    (project / "src" / "mine.py").write_text("x = 1\n")
    status = git(project, "status", "--short")
    done = check(typed(project, "scripts/reproduce.py", f"run={made}", "output=found.json"))
    found = json.loads((project / "found.json").read_text())
    assert found["reproduced"] is True
    assert "lines of uncommitted diff, as recorded, in a temporary folder" in found["code"]
    assert found["notes"] == [
        "src/mine.py is not known to git, so it was recorded nowhere and the run is made without it"
    ]
    again = RunDir(Path(found["again"]))
    assert again.environment["git_diff"] == RunDir(made).environment["git_diff"]
    assert "as recorded" in done.stdout
    (project / "found.json").unlink()
    assert git(project, "status", "--short") == status  # no trace is left
    assert git(project, "worktree", "list").count("\n") == 1
    other = typed(project, "scripts/reproduce.py", f"run={made}", "code=current", "output=found.json")
    assert other.returncode == 3, other.stderr
    found = json.loads((project / "found.json").read_text())
    assert found["reproduced"] is False
    assert found["weights"]["last.ckpt"]["differ"] == 4
    assert found["first_difference"]["step"] == 5
    assert found["environment"]["uncommitted diff"][1] == "none"
