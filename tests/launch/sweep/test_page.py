"""The commands of docs/sweeps.md, on little data."""

import json
import shlex
from pathlib import Path

import pytest
from launch.sweep.test_grid import jobs, sweeps
from support.commands import check, run
from support.documented import commands
from support.runs import ROOT

SMALL = (
    "trainer.max_epochs=1",
    "trainer.limit_train_batches=2",
    "trainer.limit_val_batches=1",
    "trainer.limit_test_batches=1",
    "trainer.accelerator=cpu",
    "trainer.enable_progress_bar=false",
    "callbacks.throughput=null",
)
COUNTS = [6, 5, 5, 6, 2, 6, 8, 6]
COMMANDS = [
    command for command in commands(ROOT / "docs" / "sweeps.md") if " -m " in command and "slurm" not in command
]


@pytest.mark.slow
@pytest.mark.parametrize(("command", "count"), list(zip(COMMANDS, COUNTS, strict=True)))
def test_command(command: str, count: int, tmp_path: Path) -> None:
    check(run(*shlex.split(command)[2:], *SMALL, cwd=tmp_path))
    (sweep,) = sweeps(tmp_path / "logs")
    assert [job["state"] for job in jobs(sweep)] == ["complete"] * count
    results = [json.loads((Path(job["run_dir"]) / "result.json").read_text()) for job in jobs(sweep)]
    shares = [0.05, 0.1] if "learning_curve" in command else []  # 65 and 130 of 1,300: a batch of 64 or two
    assert [result["steps"] for result in results] == [1, 2, 2, 2, 2, 2][:count] if shares else [2] * count
