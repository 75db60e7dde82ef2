"""A search on machines that share only a database: separate trials, counted together."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import optuna
import pytest
from launch.sweep.test_grid import WORDS, jobs, sweeps
from launch.sweep.test_search import QUICK
from support.commands import Started, check, command, run, start
from support.runs import runs

from lathe.runs.rundir import RunDir

SPACE = "sweep.space={optimizer.lr: {low: 0.001, high: 1, log: true}}"
SEARCH = ("-m", *WORDS, "sweep=optuna", SPACE, "sweep.sampler=random")


def storage(tmp_path: Path) -> str:
    return f"sweep.storage=sqlite:///{tmp_path / 'study.db'}"


def trials(tmp_path: Path) -> list[Any]:
    """Return the trials of the database's only study."""
    address = storage(tmp_path).partition("=")[2]
    (name,) = optuna.get_all_study_names(address)
    return list(optuna.load_study(study_name=name, storage=address).trials)


def numbers(log_dir: Path) -> list[int]:
    return [job["number"] for sweep in sweeps(log_dir) for job in jobs(sweep)]


def wait_for_a_run(log_dir: Path, process: Started) -> Path:
    while not (found := [path for path in runs(log_dir) if (path / "metrics.csv").exists()]):
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    return found[0]


@pytest.mark.slow
def test_two_machines_share_the_trials(tmp_path: Path) -> None:
    """Both start at once, and create the tables and the study concurrently."""
    words = (*SEARCH, *QUICK, storage(tmp_path), "sweep.trials=7")
    places = [tmp_path / "one", tmp_path / "two"]
    started = [start(command(*words, f"paths.log_dir={place}"), tmp_path) for place in places]
    for process in started:
        output, errors = process.communicate(timeout=300)
        assert process.returncode == 0, output + errors
        assert "Best " in output
    own = [numbers(place) for place in places]
    assert sorted([*own[0], *own[1]]) == list(range(7))
    told = [trial for trial in trials(tmp_path) if trial.number < 7]
    assert [trial.state.name for trial in told] == ["COMPLETE"] * 7
    assert len({trial.params["optimizer.lr"] for trial in told}) == 7
    for place in places:
        for job in jobs(sweeps(place)[0]):
            assert RunDir(job["run_dir"]).config["optimizer"]["lr"] == told[job["number"]].params["optimizer.lr"]
            assert told[job["number"]].value == RunDir(job["run_dir"]).result["val/accuracy"]
    surplus = trials(tmp_path)[7:]  # both asked for the last one concurrently
    assert [trial.state.name for trial in surplus] == ["FAIL"] * len(surplus)


@pytest.mark.slow
@pytest.mark.law3
def test_a_machine_that_is_killed_takes_its_trial_up_again(tmp_path: Path) -> None:
    longer = [word for word in SEARCH if "max_epochs" not in word]
    words = (*longer, storage(tmp_path), "sweep.trials=3", "callbacks.checkpoint.every_n_train_steps=5")
    one, two = tmp_path / "one", tmp_path / "two"
    long = (*words, "trainer.max_epochs=3", f"paths.log_dir={one}")
    process = start(command(*long), tmp_path, session=True)
    begun = wait_for_a_run(one, process)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=60)
    other = check(run(*words, "trainer.max_epochs=3", f"paths.log_dir={two}", cwd=tmp_path))
    assert numbers(two) == [1, 2]
    (sweep,) = sweeps(one)
    assert f"Trial 0 runs at {os.uname().nodename}:{sweep}, or was ended there" in other.stdout
    assert [trial.state.name for trial in trials(tmp_path)] == ["RUNNING", "COMPLETE", "COMPLETE"]
    done = check(run(*long, cwd=tmp_path))
    assert "was ended there" not in done.stdout
    (job,) = jobs(sweep)
    assert (job["number"], job["state"], Path(job["run_dir"])) == (0, "complete", begun)
    assert [trial.state.name for trial in trials(tmp_path)] == ["COMPLETE"] * 3
    assert trials(tmp_path)[0].value == RunDir(begun).result["val/accuracy"]
