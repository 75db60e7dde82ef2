"""Trials that Optuna's pruners end in a real search."""

import binascii
from pathlib import Path

import pytest
from launch.sweep.test_grid import WORDS, jobs, sweeps
from launch.sweep.test_search import QUICK, study_of
from support.commands import check, run

from lathe.runs.rundir import RunDir

SEARCH = ("-m", *(word for word in WORDS if "max_epochs" not in word), *QUICK, "sweep=optuna")
# the numbers of 17 trials in the brackets whose first rung is the first validation, the third, the ninth
BRACKETS = [1] * 9 + [3] * 5 + [9] * 3


def told(sweep: Path) -> list[tuple[str, int]]:
    """Return how each trial ended, and after how many validations."""
    return [(trial.state.name, len(trial.intermediate_values)) for trial in study_of(sweep).trials]


def whole(sweep: Path, epochs: int) -> None:
    """Assert that each run's result agrees, and that pruned runs are not tested."""
    for job, (state, validations) in zip(jobs(sweep), told(sweep), strict=True):
        result = RunDir(job["run_dir"]).result
        assert (job["state"] == "pruned") == (state == "PRUNED") == ("pruned" in result) == (validations < epochs)
        assert result["epochs"] == validations
        assert ("test/accuracy" in result) == (state == "COMPLETE")


@pytest.mark.slow
def test_hyperband_ends_runs_at_the_rungs_of_their_brackets(tmp_path: Path) -> None:
    space = "sweep.space={optimizer.lr: {low: 0.001, high: 1, log: true}}"
    words = (*SEARCH, space, "trainer.max_epochs=9", "sweep.trials=12", "sweep.pruner=hyperband")
    check(run(*words, cwd=tmp_path))
    (sweep,) = sweeps(tmp_path / "logs")
    whole(sweep, 9)
    study = study_of(sweep)
    pruned = [trial for trial in study.trials if trial.state.name == "PRUNED"]
    assert pruned
    for trial in pruned:
        first = BRACKETS[binascii.crc32(f"{study.study_name}_{trial.number}".encode()) % len(BRACKETS)]
        assert trial.last_step in [rung for rung in (1, 3) if rung >= first]  # the ninth is the run's last anyway


@pytest.mark.slow
@pytest.mark.parametrize("pruner", ["median", "percentile"])
def test_pruners_that_compare_with_the_runs_before(tmp_path: Path, pruner: str) -> None:
    """After five complete runs, one below their median, or not in their best quarter, ends at once."""
    grid = ("sweep.space={optimizer.lr: [0.3, 0.5, 0.2, 0.4, 0.25, 0.000001]}", "sweep.sampler=grid")
    grid = (*grid, "sweep.seed=19")  # draws an order whose last is the last
    check(run(*SEARCH, *grid, "trainer.max_epochs=3", f"sweep.pruner={pruner}", cwd=tmp_path))
    (sweep,) = sweeps(tmp_path / "logs")
    whole(sweep, 3)
    drawn = [RunDir(job["run_dir"]).config["optimizer"]["lr"] for job in jobs(sweep)]
    assert drawn == [0.5, 0.4, 0.2, 0.25, 0.3, 0.000001]
    assert told(sweep) == [("COMPLETE", 3)] * 5 + [("PRUNED", 1)]
