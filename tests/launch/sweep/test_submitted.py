"""A search whose jobs another Hydra launcher runs: submitit's, in processes of this machine."""

from pathlib import Path

import pytest
from launch.sweep.test_grid import WORDS, jobs, study_of, sweeps
from launch.sweep.test_search import QUICK
from support.commands import check, run

from lathe.runs.rundir import RunDir

SEARCH = (
    "-m",
    *WORDS,
    *QUICK,
    "hydra/launcher=submitit_local",
    "sweep=optuna",
    "sweep.space={optimizer.lr: [0.1, 0.3]}",
    "sweep.sampler=grid",
    "sweep.repeats={seed: [1, 2]}",
    "sweep.jobs=2",
)


@pytest.mark.slow
def test_a_search_through_submitit(tmp_path: Path) -> None:
    """Two jobs at a time."""
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    done = check(run(*SEARCH, cwd=tmp_path))
    (sweep,) = sweeps(tmp_path / "logs")
    listed, trials = jobs(sweep), study_of(sweep).trials
    assert [(job["state"], job["tries"]) for job in listed] == [("complete", 1)] * 4
    configs = [RunDir(job["run_dir"]).config for job in listed]
    assert [(config["optimizer"]["lr"], config["seed"]) for config in configs] == [
        (0.1, 1),
        (0.1, 2),
        (0.3, 1),
        (0.3, 2),
    ]
    reached = [RunDir(job["run_dir"]).result["val/accuracy"] for job in listed]
    assert [trial.value for trial in trials] == pytest.approx([sum(reached[:2]) / 2, sum(reached[2:]) / 2])
    assert "Best " in done.stdout
