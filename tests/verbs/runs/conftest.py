"""Runs to list and change."""

import json
import shutil
from datetime import datetime
from pathlib import Path

import pytest
from support.run_folders import edit, run_dirs
from support.runs import SMALL, new_run

from lathe.runs.rundir import RunDir
from lathe.training.train import train


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A complete run, trained once and copied."""
    cfg = new_run(tmp_path_factory.mktemp("made") / "logs", *SMALL, "name=digits", "tags=[baseline]")
    train(cfg)
    return Path(cfg["paths"]["run_dir"])


@pytest.fixture
def logs(made: Path, tmp_path: Path) -> Path:
    """Three runs: digits/a complete, digits/b unfinished with another rate and seed, other/c complete and pruned."""
    folder = tmp_path / "logs"
    for name, stamp in (("digits", "10-00-00_aaaaaa"), ("digits", "11-00-00_bbbbbb"), ("other", "12-00-00_cccccc")):
        path = folder / name / f"2026-11-20_{stamp}"
        shutil.copytree(made, path)
        environment = json.loads((path / "environment.json").read_text())
        began = datetime(2026, 11, 20, int(stamp[:2])).astimezone()
        (path / "environment.json").write_text(json.dumps({**environment, "started": began.isoformat()}))
    _, b, c = run_dirs(folder)
    (b / ".lock").touch()
    edit(b, "config.yaml", optimizer={"lr": 0.2}, seed=7, tags=[])
    (b / "result.json").unlink()
    (b / "overrides.yaml").write_text("- model=mlp\n- optimizer.lr=0.2\n- seed=7\n")
    result = RunDir(c).result
    RunDir(c).finish({**result, "pruned": 20, "test/accuracy": 0.125, "objective": 0.25, "val/accuracy": 0.25})
    (folder / "latest").symlink_to(c.relative_to(folder))
    return folder
