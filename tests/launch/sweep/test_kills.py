"""A sweep killed at any moment and restarted: every job completes once, with unchanged weights."""

import os
import random
import signal
import time
from pathlib import Path

import pytest
from launch.sweep.test_grid import jobs, sweeps
from support.commands import Started, check, command, run, start
from support.interruptions import same
from support.runs import SMALL, rows, runs

from lathe.runs.rundir import RunDir

WORDS = (
    *(word for word in SMALL if "max_epochs" not in word and "width" not in word),
    "trainer.max_epochs=2",
    "model.net.width=512",
    "callbacks.throughput=null",
    "callbacks.checkpoint.every_n_train_steps=7",
)
SWEEP = ("-m", *WORDS, "seed=1,2,3,4", "sweep.jobs=2")


def wait_for(log_dir: Path, process: Started, count: int, lines: int) -> None:
    """Wait until so many runs have so many lines of metrics."""
    while True:
        begun = [path for path in runs(log_dir) if (path / "metrics.csv").exists()]
        if sum(len(rows(path)) >= lines for path in begun) >= count:
            return
        assert process.poll() is None
        time.sleep(0.01)


def lines(log_dir: Path) -> int:
    """Count the lines of metrics of all runs."""
    return sum(len(rows(path)) for path in runs(log_dir) if (path / "metrics.csv").exists())


@pytest.mark.slow
@pytest.mark.law3
def test_kill_9_at_five_moments(tmp_path: Path) -> None:
    check(run(*SWEEP, "paths.log_dir=alone", cwd=tmp_path))
    seed = random.randrange(10**6)
    print(f"moments drawn with seed {seed}")  # shown if the test fails
    drawn, total = random.Random(seed), lines(tmp_path / "alone")
    for moment in sorted(drawn.uniform(0, 0.9) * total for _ in range(5)):
        process = start(command(*SWEEP), tmp_path, session=True)
        while lines(tmp_path / "logs") < moment or not sweeps(tmp_path / "logs"):
            assert process.poll() is None
            time.sleep(0.01)
        os.kill(process.pid, signal.SIGKILL)
        process.communicate(timeout=60)
    check(run(*SWEEP, cwd=tmp_path))
    (sweep,) = sweeps(tmp_path / "logs")
    listed = jobs(sweep)
    assert [job["state"] for job in listed] == ["complete"] * 4
    assert sorted(job["run_dir"] for job in listed) == sorted(map(str, runs(tmp_path / "logs")))
    alone = {RunDir(path).config["seed"]: path for path in runs(tmp_path / "alone")}
    for job in listed:
        same(alone[job["number"] + 1], Path(job["run_dir"]))


@pytest.mark.law3
def test_a_first_signal_lets_jobs_write_their_checkpoints_and_a_second_ends_them(tmp_path: Path) -> None:
    longer = (*SWEEP, "trainer.max_epochs=200")
    process = start(command(*longer), tmp_path, session=True)
    wait_for(tmp_path / "logs", process, 2, 3)
    os.kill(process.pid, signal.SIGINT)
    output, errors = process.communicate(timeout=60)
    assert process.wait() == 128 + signal.SIGINT
    assert "Stopping: the jobs write their checkpoints; once more ends them at once." in output
    (sweep,) = sweeps(tmp_path / "logs")
    told = f"Error: stopped by SIGINT; the same command takes the sweep up again ({sweep})"
    assert errors.splitlines()[-1] == told
    assert [job["state"] for job in jobs(sweep)] == ["waiting"] * 4
    found = runs(tmp_path / "logs")
    assert all((path / "checkpoints" / "last.ckpt").exists() for path in found)
    process = start(command(*longer), tmp_path, session=True)
    most = max(len(rows(path)) for path in found)
    wait_for(tmp_path / "logs", process, 2, most + 3)
    os.kill(process.pid, signal.SIGTERM)
    os.kill(process.pid, signal.SIGINT)
    process.communicate(timeout=30)
    assert process.wait() in (128 + signal.SIGTERM, 128 + signal.SIGINT)
    assert runs(tmp_path / "logs") == found  # the restarted sweep resumed them
