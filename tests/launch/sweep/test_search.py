"""A search: trials train with Optuna's parameters, and Optuna gets the runs' results."""

import binascii
import re
from pathlib import Path
from typing import Any

import pytest
from launch.sweep.test_grid import WORDS, forget_since, jobs, study_of, sweeps
from support.commands import check, run
from support.runs import rows, runs

from lathe.errors import UserError
from lathe.launch.sweep.job_sources import entry_of
from lathe.runs.rundir import RunDir

SPACE = "sweep.space={optimizer.lr: {low: 0.001, high: 1, log: true}, model.net.width: {low: 8, high: 64, step: 8}}"
SEARCH = ("-m", *WORDS, "sweep=optuna")
LONGER = tuple(word for word in SEARCH if "max_epochs" not in word)
QUICK = ("trainer.limit_train_batches=2", "trainer.limit_val_batches=1")


def points(sweep: Path) -> list[list[str]]:
    return [job["overrides"][-2:] for job in jobs(sweep)]


def test_each_trial_is_a_run_and_its_number_the_runs_own(tmp_path: Path) -> None:
    """The width is drawn only where the net has one."""
    space = "model: [mlp, deep_mlp], model.net.width: {values: [8, 16], when: {model: mlp}}"
    words = [word for word in SEARCH if not word.startswith("model")]
    lr = "optimizer.lr: {low: 0.001, high: 1, log: true}"
    more = ("sweep.trials=4", "sweep.sampler=random")
    done = check(run(*words, f"sweep.space={{{space}, {lr}}}", *QUICK, *more, cwd=tmp_path))
    (sweep,) = sweeps(tmp_path / "logs")
    trials = study_of(sweep).trials
    assert [trial.state.name for trial in trials] == ["COMPLETE"] * 4
    drawn = [[word for word in job["overrides"] if word.startswith("model")] for job in jobs(sweep)]
    assert {tuple(re.sub(r"\d+$", "", word) for word in words) for words in drawn} == {
        ("model=mlp", "model.net.width="),
        ("model=deep_mlp",),
    }
    for job, trial in zip(jobs(sweep), trials, strict=True):
        made = RunDir(job["run_dir"])
        assert made.config["optimizer"]["lr"] == trial.params["optimizer.lr"]
        assert made.config["model"]["net"]["width"] == trial.params.get("model.net.width", 256)
        assert [made.result["val/accuracy"]] == trial.values == job["values"]
    best = max(trials, key=lambda trial: trial.value)  # accuracy is maximised
    assert f"Best val/accuracy, {best.value:.4g}: job {best.number}, model={best.params['model']} " in done.stdout


def test_a_run_that_falls_behind_is_ended_early_and_whole(tmp_path: Path) -> None:
    epochs = ("trainer.max_epochs=4", "trainer.limit_train_batches=5")
    check(run(*LONGER, SPACE, *epochs, "sweep.trials=5", "sweep.pruner=asha", cwd=tmp_path))
    (sweep,) = sweeps(tmp_path / "logs")
    listed, trials = jobs(sweep), study_of(sweep).trials
    pruned = [job for job in listed if job["state"] == "pruned"]
    assert 0 < len(pruned) < 5
    assert [job["number"] for job in pruned] == [t.number for t in trials if t.state.name == "PRUNED"]
    for job in listed:
        made, reported = RunDir(job["run_dir"]), trials[job["number"]].intermediate_values
        lines = [float(row["val/accuracy"]) for row in rows(made.path) if row.get("val/accuracy")]
        assert list(reported.values()) == pytest.approx(lines[: len(reported)])
        assert list(reported) == list(range(1, len(reported) + 1))
        if job["state"] == "pruned":
            assert made.result["pruned"] == made.result["steps"] == 5 * len(reported)
            assert "test/accuracy" not in made.result
            assert len(reported) < 4
        else:
            assert made.result["epochs"] == 4
            assert "test/accuracy" in made.result
        assert (made.path / "checkpoints" / "best.ckpt").exists()


# the numbers of 17 trials in the brackets whose first rung is the first validation, the third, the ninth
BRACKETS = [1] * 9 + [3] * 5 + [9] * 3


@pytest.mark.slow
def test_hyperband_ends_runs_at_the_rungs_of_their_brackets(tmp_path: Path) -> None:
    space = "sweep.space={optimizer.lr: {low: 0.001, high: 1, log: true}}"
    words = (*LONGER, *QUICK, space, "trainer.max_epochs=9", "sweep.trials=12", "sweep.pruner=hyperband")
    check(run(*words, cwd=tmp_path))
    (sweep,) = sweeps(tmp_path / "logs")
    study = study_of(sweep)
    pruned = [trial for trial in study.trials if trial.state.name == "PRUNED"]
    assert pruned
    for trial in pruned:
        first = BRACKETS[binascii.crc32(f"{study.study_name}_{trial.number}".encode()) % len(BRACKETS)]
        assert trial.last_step in [rung for rung in (1, 3) if rung >= first]  # the ninth is the run's last anyway


@pytest.mark.slow
def test_a_search_that_was_cut_short_is_resumed_with_more_trials(tmp_path: Path) -> None:
    """The kill came between the start of a trial and its job."""
    quick = (*SEARCH, SPACE, *QUICK, "sweep.sampler=random")
    check(run(*quick, "sweep.trials=4", "paths.log_dir=alone", cwd=tmp_path))
    check(run(*quick, "sweep.trials=3", cwd=tmp_path))
    (sweep,), (alone,) = sweeps(tmp_path / "logs"), sweeps(tmp_path / "alone")
    before = jobs(sweep)[:2]
    forget_since(sweep, '"jobs"')
    (sweep / "jobs" / "00002.json").unlink()
    check(run(*quick, "sweep.trials=4", f"sweep.resume={sweep}", cwd=tmp_path))
    assert [trial.state.name for trial in study_of(sweep).trials] == ["COMPLETE"] * 2 + ["FAIL", "COMPLETE", "COMPLETE"]
    assert jobs(sweep)[:2] == before
    assert points(sweep)[:3] == [*points(alone)[:2], points(alone)[3]]  # a draw depends on the trial's number


@pytest.mark.parametrize(
    "entry", [{"low": 1}, {"low": 2, "high": 1}, {"lo": 1, "high": 9}, {"low": 1, "high": float("inf")}, [1, 2, 1]]
)
def test_a_key_that_can_not_be_drawn_is_refused(entry: Any) -> None:
    with pytest.raises(UserError, match=r"^sweep\.space\.k="):
        entry_of("k", entry)


LR = "sweep.space={optimizer.lr: [0.1]}"
SENTENCES = {
    "no space": (["sweep=optuna"], "sweep.space: "),
    "a key that is none": (["sweep=optuna", "sweep.space={optimizer.rl: [0.1]}"], "optimizer.rl: "),
    "values beside it": (["sweep=optuna", LR, "seed=1,2"], "a search draws the values that sweep.space names"),
    "a grid without end": (
        ["sweep=optuna", "sweep.sampler=grid", "sweep.space={optimizer.lr: {low: 0.1, high: 1.0}}"],
        "sweep.space.optimizer.lr: ",
    ),
    "no way": (["sweep=optuna", LR, "sweep.objectives=[own/thing]"], "sweep.directions: "),
    "a storage": (["sweep=optuna", LR, "sweep.storage=nowhere"], "sweep.storage=nowhere "),
}


@pytest.mark.law7
@pytest.mark.parametrize("case", SENTENCES)
def test_a_mistake_costs_one_line(tmp_path: Path, case: str) -> None:
    typed, sentence = SENTENCES[case]
    done = run("-m", "model=mlp", *typed, cwd=tmp_path)
    assert (done.returncode, len(done.stderr.splitlines())) == (1, 1), done.stderr
    assert done.stderr.startswith(f"Error: {sentence}")
    assert not runs(tmp_path / "logs")
    assert not sweeps(tmp_path / "logs")


@pytest.mark.slow
def test_a_search_through_submitit(tmp_path: Path) -> None:
    """Two jobs at a time."""
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    grid = ("sweep.space={optimizer.lr: [0.1]}", "sweep.sampler=grid", "sweep.repeats={seed: [1, 2]}")
    done = check(run(*SEARCH, *QUICK, *grid, "hydra/launcher=submitit_local", "sweep.jobs=2", cwd=tmp_path))
    (sweep,) = sweeps(tmp_path / "logs")
    listed, trials = jobs(sweep), study_of(sweep).trials
    assert [(job["state"], job["tries"]) for job in listed] == [("complete", 1)] * 2
    configs = [RunDir(job["run_dir"]).config for job in listed]
    typed = [(config["optimizer"]["lr"], config["seed"]) for config in configs]
    assert typed == [(0.1, 1), (0.1, 2)]
    reached = [RunDir(job["run_dir"]).result["val/accuracy"] for job in listed]
    assert [trial.value for trial in trials] == pytest.approx([sum(reached) / 2])
    assert "Best " in done.stdout
