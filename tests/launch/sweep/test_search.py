"""A search: trials train with Optuna's parameters, and Optuna gets the runs' results."""

import re
from pathlib import Path
from typing import Any

import pytest
from launch.sweep.test_grid import WORDS, jobs, sweeps
from omegaconf import OmegaConf
from support.commands import check, run
from support.runs import rows, runs

from lathe.errors import UserError
from lathe.launch.sweep.search_space import entry_of
from lathe.runs.optuna_study import open_study
from lathe.runs.rundir import RunDir

SPACE = "sweep.space={optimizer.lr: {low: 0.001, high: 1, log: true}, model.net.width: {low: 8, high: 64, step: 8}}"
SEARCH = ("-m", *WORDS, "sweep=optuna", SPACE)
QUICK = ("trainer.limit_train_batches=2", "trainer.limit_val_batches=1")


def study_of(sweep: Path) -> Any:
    facts: Any = OmegaConf.to_container(OmegaConf.load(sweep / "sweep.yaml"))
    return open_study(sweep, facts)


def points(sweep: Path) -> list[list[str]]:
    return [job["overrides"][-2:] for job in jobs(sweep)]


@pytest.mark.slow
def test_each_trial_is_a_run_and_its_number_the_runs_own(tmp_path: Path) -> None:
    quick = (*SEARCH, *QUICK, "sweep.trials=4")
    done = check(run(*quick, cwd=tmp_path))
    (sweep,) = sweeps(tmp_path / "logs")
    trials = study_of(sweep).trials
    assert [trial.state.name for trial in trials] == ["COMPLETE"] * 4
    for job, trial in zip(jobs(sweep), trials, strict=True):
        made = RunDir(job["run_dir"])
        assert made.config["optimizer"]["lr"] == trial.params["optimizer.lr"]
        assert made.config["model"]["net"]["width"] == trial.params["model.net.width"]
        assert [made.result["val/accuracy"]] == trial.values == job["values"]
    best = max(trials, key=lambda trial: trial.value)  # accuracy is maximised
    assert (
        f"Best val/accuracy, {best.value:.4g}: job {best.number}, optimizer.lr={best.params['optimizer.lr']} "
        in done.stdout
    )
    check(run(*quick, "paths.log_dir=again", cwd=tmp_path))
    assert points(sweeps(tmp_path / "again")[0]) == points(sweep)  # its seed draws the same


def test_a_run_that_falls_behind_is_ended_early_and_whole(tmp_path: Path) -> None:
    longer = [word for word in SEARCH if "max_epochs" not in word]
    check(run(*longer, "trainer.max_epochs=6", "sweep.trials=6", "sweep.pruner=asha", cwd=tmp_path))
    (sweep,) = sweeps(tmp_path / "logs")
    listed, trials = jobs(sweep), study_of(sweep).trials
    pruned = [job for job in listed if job["state"] == "pruned"]
    assert 2 <= len(pruned) < 6
    assert [job["number"] for job in pruned] == [t.number for t in trials if t.state.name == "PRUNED"]
    for job in listed:
        made, reported = RunDir(job["run_dir"]), trials[job["number"]].intermediate_values
        lines = [float(row["val/accuracy"]) for row in rows(made.path) if row.get("val/accuracy")]
        assert list(reported.values()) == pytest.approx(lines[: len(reported)])
        assert list(reported) == list(range(1, len(reported) + 1))
        assert made.complete
        if job["state"] == "pruned":
            assert made.result["pruned"] == made.result["steps"] == 20 * len(reported)
            assert "test/accuracy" not in made.result
            assert len(reported) < 6
        else:
            assert made.result["epochs"] == 6
            assert "test/accuracy" in made.result
        assert (made.path / "checkpoints" / "best.ckpt").exists()


def test_a_trial_that_is_tried_again_is_told_once(tmp_path: Path) -> None:
    """Its first process is killed; the study gets the second's value."""
    space = "sweep.space={seed: [2]}"
    words = [word for word in SEARCH if not word.startswith("sweep.space")]
    dies = ("+callbacks.dies={_target_: support.sweep_parts.Dies}", "callbacks.checkpoint.every_n_train_steps=5")
    check(run(*words, space, *dies, "sweep.trials=1", "sweep.retries=1", cwd=tmp_path))
    (sweep,) = sweeps(tmp_path / "logs")
    (job,), (trial,) = jobs(sweep), study_of(sweep).trials
    assert (job["state"], job["tries"], trial.state.name) == ("complete", 2, "COMPLETE")
    assert trial.values == [RunDir(job["run_dir"]).result["val/accuracy"]]


def test_keys_that_are_drawn_only_where_another_has_a_value(tmp_path: Path) -> None:
    space = "sweep.space={model: [mlp, deep_mlp], model.net.width: {values: [8, 16], when: {model: mlp}}}"
    words = [word for word in SEARCH if not word.startswith(("model", "sweep.space"))]
    check(run(*words, space, *QUICK, "sweep.trials=4", "sweep.sampler=random", cwd=tmp_path))
    (sweep,) = sweeps(tmp_path / "logs")
    drawn = [[word for word in job["overrides"] if word.startswith("model")] for job in jobs(sweep)]
    assert {tuple(re.sub(r"\d+$", "", word) for word in words) for words in drawn} == {
        ("model=mlp", "model.net.width="),
        ("model=deep_mlp",),
    }


def test_a_grid_ends_when_all_of_it_was_run_and_several_objectives_have_several_best(tmp_path: Path) -> None:
    grid = "sweep.space={model.net.width: [8, 16], seed: {low: 1, high: 2}}"
    words = [word for word in SEARCH if not word.startswith(("model.net.width", "sweep.space"))]
    more = ("sweep.sampler=grid", "sweep.objectives=[val/accuracy,parameters]")
    done = check(run(*words, grid, *more, *QUICK, cwd=tmp_path))
    (sweep,) = sweeps(tmp_path / "logs")
    assert points(sweep) == [[f"model.net.width={w}", f"seed={s}"] for w in (8, 16) for s in (1, 2)]
    study = study_of(sweep)
    assert [way.name for way in study.directions] == ["MAXIMIZE", "MINIMIZE"]
    assert [trial.values[1] for trial in study.trials] == [
        RunDir(job["run_dir"]).result["parameters"] for job in jobs(sweep)
    ]
    assert done.stdout.count("Best ") == len(study.best_trials)


@pytest.mark.slow
def test_a_search_that_was_cut_short_goes_on_as_it_would_have(tmp_path: Path) -> None:
    """Also if the kill came between the study's record and the job's file."""
    quick = (*SEARCH, *QUICK, "sweep.sampler=random")
    check(run(*quick, "sweep.trials=4", "paths.log_dir=alone", cwd=tmp_path))
    check(run(*quick, "sweep.trials=4", cwd=tmp_path))
    (sweep,), (alone,) = sweeps(tmp_path / "logs"), sweeps(tmp_path / "alone")
    (sweep / "done").unlink()
    (sweep / "jobs" / "00003.json").unlink()
    lines = (sweep / "study.log").read_text().splitlines(keepends=True)
    told = [place for place, line in enumerate(lines) if '"trial_id":3' in line and '"op_code":6' in line]
    assert told
    (sweep / "study.log").write_text("".join(lines[: told[-1]]))
    check(run(*quick, "sweep.trials=4", cwd=tmp_path))
    assert [trial.state.name for trial in study_of(sweep).trials] == ["COMPLETE"] * 3 + ["FAIL", "COMPLETE"]
    assert points(sweep)[:3] == points(alone)[:3]
    assert len(jobs(sweep)) == 4
    assert len(runs(tmp_path / "logs")) == 5


ENTRIES = {
    "half a range": ({"low": 1}, "sweep.space.k="),
    "turned round": ({"low": 2, "high": 1}, "sweep.space.k: "),
    "a strange word": ({"lo": 1, "high": 9}, "sweep.space.k="),
    "no end": ({"low": 1, "high": float("inf")}, "sweep.space.k: "),
    "twice": ([1, 2, 1], "sweep.space.k=[1, 2, 1]: 1 is there twice"),
}


@pytest.mark.parametrize("case", ENTRIES)
def test_what_a_space_may_say(case: str) -> None:
    entry, sentence = ENTRIES[case]
    with pytest.raises(UserError) as told:
        entry_of("k", entry)
    assert str(told.value).startswith(sentence)


@pytest.mark.slow
def test_a_search_goes_on_with_more_trials_as_one_of_so_many(tmp_path: Path) -> None:
    quick = (*SEARCH, *QUICK, "sweep.sampler=random")
    check(run(*quick, "sweep.trials=2", cwd=tmp_path))
    (sweep,) = sweeps(tmp_path / "logs")
    before = jobs(sweep)
    check(run(*quick, "sweep.trials=3", f"sweep.resume={sweep}", cwd=tmp_path))
    assert jobs(sweep)[:2] == before
    check(run(*quick, "sweep.trials=3", "paths.log_dir=again", cwd=tmp_path))
    assert points(sweep) == points(sweeps(tmp_path / "again")[0])


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
