"""Commands that a run prints about its directory work where they are typed."""

import os
import shlex
from pathlib import Path
from typing import Any

import pytest
from support.runs import config, new_run

from lathe import trust
from lathe.runs.rundir import RunDir, open_run, run_command, script_path
from lathe.training.final_evaluation import proposals
from lathe.training.run_start import RunStart

CHECKPOINT = "lightning.pytorch.callbacks.ModelCheckpoint"
OWN = f"+callbacks.mc={{_target_: {CHECKPOINT}, monitor: val/loss}}"


def started(*words: str, tmp_path: Path) -> dict[str, Any]:
    """A run with these overrides, in a folder whose name must be quoted."""
    cfg = new_run(tmp_path / "logs", "model=mlp", *words)
    trust.allow(dict(cfg))
    run = RunDir(Path(cfg["paths"]["run_dir"]).rename(tmp_path / "größe, 'eins'"))
    cfg["paths"]["run_dir"] = str(run.path)
    run.best.parent.mkdir()
    run.best.touch()
    return cfg


def opens(command: str, key: str, name: str) -> dict[str, Any]:
    """The run's configuration, as the printed `command` reads it."""
    words = shlex.split(command)[2:]
    request = config(*words, name=name)
    trust.allow(request)
    return open_run(request[key], key).config


@pytest.mark.parametrize("words", [(), (OWN,)], ids=len)
def test_the_printed_commands_open_the_run(words: tuple[str, ...], tmp_path: Path) -> None:
    cfg = started(*words, tmp_path=tmp_path)
    run = RunDir(cfg["paths"]["run_dir"])
    run.save_config(cfg)
    commands = RunStart(run, cfg, 0, None).command, proposals(run, cfg, {"val/loss": 0.5})[0]
    for command, key, verb in zip(commands, ("resume", "run"), ("train", "evaluate"), strict=True):
        trust.allow({})
        assert opens(command, key, verb)["callbacks"] == cfg["callbacks"]


@pytest.mark.parametrize("script", ["train.py", "scripts/evaluate.py"])
@pytest.mark.parametrize(("place", "absolute"), [(".", False), ("scripts", False), ("../other", True)])
def test_a_script_has_its_path_from_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, place: str, absolute: bool
) -> None:
    project = tmp_path / "my project"
    for name in ("train.py", "scripts/evaluate.py", "scripts/report.py"):
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).touch()
    folder = project / place
    folder.mkdir(parents=True, exist_ok=True)
    monkeypatch.chdir(folder)
    monkeypatch.setattr("sys.argv", [str(project / script) if absolute else os.path.relpath(project / script)])
    for name in ("train.py", "scripts/report.py"):
        named = script_path(name)
        assert os.path.samefile(named, project / name)
        assert (named == name) == (place == ".")
        assert shlex.split(run_command(name, "run", "x y"))[1] == named
