"""Each recipe of docs/own_parts.md works as printed, with the real command in a clone with its files."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.commands import environment, forget, in_process
from support.runs import ROOT, SMALL, column, rows, runs

import lathe
from lathe.runs.rundir import RunDir

PAGE = (ROOT / "docs" / "own_parts.md").read_text()
RECIPES = re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", PAGE, flags=re.MULTILINE | re.DOTALL)
TEN = ["Net", "Data", "Loss", "Metric", "Transform", "Optimizer", "Scheduler", "Callback", "Task", "Strategy"]
SHORT = [word for word in SMALL if not word.startswith("data.")]


def blocks(kind: str, text: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


def on_path(clone: Path) -> dict[str, str]:
    return environment(PYTHONPATH=os.pathsep.join([str(clone / "src"), os.environ.get("PYTHONPATH", "")]))


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The page's files, importable, with the included configurations."""
    folder = tmp_path_factory.mktemp("clone")
    shutil.copytree(ROOT / "configs", folder / "configs", ignore=shutil.ignore_patterns("__pycache__", "local"))
    for _, text in RECIPES:
        for block in [*blocks("python", text), *blocks("yaml", text)]:
            name = re.match(r"# ((?:src/mine|configs|scripts)/\S+)\n", block)
            assert name, block
            (folder / name[1]).parent.mkdir(parents=True, exist_ok=True)
            (folder / name[1]).write_text(block)
    shutil.copy(ROOT / "train.py", folder)
    sys.path.insert(0, str(folder / "src"))
    forget("mine")
    yield folder
    sys.path.remove(str(folder / "src"))
    forget("mine")


@pytest.mark.parametrize("name", [*TEN[:-1], "Lightning"])
def test_a_recipe_trains(clone: Path, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (command,) = blocks("bash", dict(RECIPES)[name])
    typed = shlex.split(command)[2:]
    short = [word for word in SHORT if name not in ("Net", "Lightning") or not word.startswith("model")]
    code = in_process(str(clone / "train.py"), *short, *typed, f"paths.log_dir={tmp_path}", "logger=none")
    said = capsys.readouterr()
    assert code == 0, said.err
    (run,) = runs(tmp_path)
    result, lines = json.loads((run / "result.json").read_text()), rows(run)
    assert result["epochs"] == 2
    losses = column(run, "train_loss_epoch" if name == "Lightning" else "train/loss_epoch")
    assert losses[-1] < losses[0]
    assert ("val/worst_class" in result) == (name == "Metric")
    assert ("val/grades_off" in result) == (name == "Task")
    assert any(line.get("weights/largest") for line in lines) == (name == "Callback")
    if name == "Data":  # a fifth of the images outside the test split
        assert RunDir(run).config["data"]["folds"] == 5
    if name in ("Net", "Lightning"):
        assert RunDir(run).config["model"]["net"]["width"] == 32


def test_a_command_runs_on_a_run(clone: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert in_process(str(clone / "train.py"), *SMALL, f"paths.log_dir={tmp_path}", "logger=none") == 0
    (command,) = blocks("bash", dict(RECIPES)["Command"])
    script, run, *typed = shlex.split(command)[1:]
    assert run == "run=logs/latest"
    capsys.readouterr()
    assert in_process(str(clone / script), f"run={tmp_path}/latest", *typed) == 0
    printed = [line.split() for line in capsys.readouterr().out.splitlines()]
    (made,) = runs(tmp_path)
    state = lathe.load(made).net.state_dict()
    assert len(printed) == 3
    assert [float(norm) for norm, _ in printed] == sorted((float(norm) for norm, _ in printed), reverse=True)
    for norm, name in printed:
        assert float(norm) == pytest.approx(float(state[name].norm()), abs=1e-3)
    for wrong, key in (("launch.threads=many", "launch.threads=many"), ("topp=3", "topp")):
        assert in_process(str(clone / script), f"run={tmp_path}/latest", wrong) == 1
        assert capsys.readouterr().err.startswith(f"Error: {key}: ")


@pytest.mark.slow
def test_a_target_passes_its_comparison(clone: Path, tmp_path: Path) -> None:
    for folder in ("src/lathe", "scripts"):
        shutil.copytree(ROOT / folder, clone / folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    assert in_process("train.py", *SMALL, f"paths.log_dir={tmp_path}", "logger=none") == 0
    (command,) = blocks("bash", dict(RECIPES)["Target"])
    script, _, *typed = shlex.split(command)[1:]

    def export(*words: str) -> subprocess.CompletedProcess[str]:
        line = [sys.executable, script, f"run={tmp_path}/latest", *typed, *words]
        return subprocess.run(line, cwd=clone, env=on_path(clone), capture_output=True, text=True, timeout=300)

    done = export()
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "latest/exports/npz"
    found = json.loads((folder / "parity.json").read_text())["held_out"]
    assert (found["n"], found["largest"]) == (297, 0.0)
    assert json.loads((folder / "manifest.json").read_text())["options"] == {"compressed": False}
    done = export("+target.npy.compressed=true")
    assert done.returncode == 1
    assert done.stderr.startswith("Error: target.npy: unknown key in target; ")


@pytest.mark.slow
def test_a_strategy_spreads_over_two_processes(clone: Path) -> None:
    (command,) = blocks("bash", dict(RECIPES)["Strategy"])
    done = subprocess.run(
        [sys.executable, *shlex.split(command)[1:], "model=mlp", "trainer.max_epochs=1"],
        cwd=clone,
        env=on_path(clone),
        capture_output=True,
        text=True,
        timeout=300,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stderr
    assert "test/accuracy" in done.stdout
