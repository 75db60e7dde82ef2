"""Several runs of each trial: the study gets their mean, and a trial that falls behind is cut short."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from launch.sweep.test_grid import jobs, study_of, sweeps
from launch.sweep.test_search import QUICK, SEARCH
from support.commands import check, command, run, start
from support.runs import runs

from lathe.errors import UserError
from lathe.launch.sweep.job_sources import check_pruner
from lathe.runs.rundir import RunDir
from lathe.verbs.runs.reader import find_runs

GRID = (*SEARCH, *QUICK, "sweep.space={optimizer.lr: [0.3, 0.000001]}", "sweep.sampler=grid")
ONE = (*SEARCH, *QUICK, "sweep.space={optimizer.lr: [0.3]}", "sweep.trials=1", "sweep.repeats={seed: [1, 2, 3]}")


@pytest.mark.slow
def test_the_study_is_told_the_means_of_a_trials_runs(tmp_path: Path) -> None:
    objectives = "sweep.objectives=[val/accuracy,parameters]"
    done = check(run(*GRID, "sweep.repeats={seed: [3, 4], data.share: [0.5]}", objectives, cwd=tmp_path))
    (sweep,) = sweeps(tmp_path / "logs")
    listed, study = jobs(sweep), study_of(sweep)
    assert [(job["trial"], job["repeat"]) for job in listed] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    made = [RunDir(job["run_dir"]) for job in listed]
    typed = [(run.config["optimizer"]["lr"], run.config["seed"], run.config["data"]["share"]) for run in made]
    assert typed == [(0.3, 3, 0.5), (0.3, 4, 0.5), (0.000001, 3, 0.5), (0.000001, 4, 0.5)]
    reached = [[run.result["val/accuracy"], run.result["parameters"]] for run in made]
    assert [job["values"] for job in listed] == reached
    for trial, pair in zip(study.trials, (reached[:2], reached[2:]), strict=True):
        assert trial.values == pytest.approx([(a + b) / 2 for a, b in zip(*pair, strict=True)])
    assert [way.name for way in study.directions] == ["MAXIMIZE", "MINIMIZE"]
    assert done.stdout.count("Best ") == len(study.best_trials)


@pytest.mark.slow
def test_a_trial_that_falls_behind_is_cut_short(tmp_path: Path) -> None:
    """All of its first two runs are below those of the first trial: p = 1/4."""
    pruner = "sweep.pruner={_target_: optuna.pruners.WilcoxonPruner, p_threshold: 0.3}"
    done = check(run(*GRID, "sweep.repeats={seed: [1, 2, 3, 4]}", pruner, cwd=tmp_path))
    (sweep,) = sweeps(tmp_path / "logs")
    listed, trials = jobs(sweep), study_of(sweep).trials
    assert [trial.state.name for trial in trials] == ["COMPLETE", "PRUNED"]
    assert [job["state"] for job in listed] == ["complete"] * 6 + ["pruned"] * 2
    assert [trial.intermediate_values for trial in trials] == [
        {repeat: listed[repeat]["values"][0] for repeat in range(4)},
        {repeat: listed[4 + repeat]["values"][0] for repeat in range(2)},
    ]
    sentence = "not run, as trial 1 fell behind in 2 of its 4 runs."
    assert [(job["run_dir"], job["sentence"]) for job in listed[6:]] == [(None, sentence)] * 2
    assert f"pruned, {sentence}" in done.stdout
    assert len(runs(tmp_path / "logs")) == 6
    assert [found.state for found in find_runs(str(sweep))] == ["complete"] * 6 + ["pruned"] * 2


def test_a_run_that_fails_costs_its_trial(tmp_path: Path) -> None:
    done = run(*ONE, "+callbacks.falls={_target_: support.sweep_parts.Falls}", cwd=tmp_path)
    assert done.returncode == 1
    (sweep,) = sweeps(tmp_path / "logs")
    assert [(job["state"], job["sentence"]) for job in jobs(sweep)] == [
        ("complete", None),
        ("failed", "ValueError: no luck. Trial 0 fails with it."),
        ("pruned", "not run, as job 1 failed, and trial 0 with it."),
    ]
    assert [trial.state.name for trial in study_of(sweep).trials] == ["FAIL"]
    assert done.stderr.splitlines()[-1].endswith("Trial 0 fails with it. No trial is left to go by.")
    assert (sweep / "done").exists()


@pytest.mark.law3
def test_kill_9_keeps_the_runs_that_are_complete(tmp_path: Path) -> None:
    process = start(command(*ONE), tmp_path, session=True)
    while not any(
        '"state": "complete"' in page.read_text() for page in (tmp_path / "logs").glob("sweeps/*/jobs/0*.json")
    ):
        assert process.poll() is None
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=60)
    (sweep,) = sweeps(tmp_path / "logs")
    kept = jobs(sweep)[0]["run_dir"]
    check(run(*ONE, cwd=tmp_path))
    listed, (trial,) = jobs(sweep), study_of(sweep).trials
    assert [job["state"] for job in listed] == ["complete"] * 3
    assert listed[0]["run_dir"] == kept
    assert (listed[0]["tries"], len(runs(tmp_path / "logs"))) == (1, 3)
    assert trial.value == pytest.approx(sum(job["values"][0] for job in listed) / 3)


SEEDS = {"seed": [1, 2, 3, 4, 5]}


@pytest.mark.law7
@pytest.mark.parametrize(("pruner", "repeats"), [("wilcoxon", None), ("asha", SEEDS)])
def test_a_pruner_that_could_do_nothing_is_refused(pruner: str, repeats: Any) -> None:
    with pytest.raises(UserError, match=f"^sweep.pruner={pruner} "):
        check_pruner({"pruner": pruner, "repeats": repeats}, 5 if repeats else 1)
