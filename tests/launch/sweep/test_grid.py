"""A sweep of known jobs: each in a separate process, as if launched by itself."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf
from support.commands import check, run
from support.interruptions import same
from support.runs import SMALL, runs

from lathe.runs.optuna_study import open_study
from lathe.runs.rundir import RunDir

WORDS = (*(word for word in SMALL if "max_epochs" not in word), "trainer.max_epochs=1", "callbacks.throughput=null")


def sweeps(log_dir: Path) -> list[Path]:
    """The directories of sweeps, oldest first."""
    return sorted(path.parent for path in (log_dir / "sweeps").glob("*/sweep.yaml"))


def jobs(sweep: Path) -> list[dict[str, Any]]:
    """Return the sweep's records of its jobs."""
    return [json.loads(path.read_text()) for path in sorted((sweep / "jobs").glob("[0-9]*.json"))]


def study_of(sweep: Path) -> Any:
    """Return the sweep's Optuna study."""
    facts: Any = OmegaConf.to_container(OmegaConf.load(sweep / "sweep.yaml"))
    return open_study(sweep, facts)


def forget_since(sweep: Path, text: str) -> None:
    """Cut the study's journal before the last line with `text`, as a kill would have."""
    lines = (sweep / "study.log").read_text().splitlines(keepends=True)
    last = max(place for place, line in enumerate(lines) if text in line)
    (sweep / "study.log").write_text("".join(lines[:last]))
    (sweep / "done").unlink()


def test_each_job_is_the_run_that_the_same_words_make_alone(tmp_path: Path) -> None:
    done = check(run("-m", *WORDS, "seed=1,2", "sweep.jobs=2", cwd=tmp_path))
    (sweep,) = sweeps(tmp_path / "logs")
    listed = jobs(sweep)
    assert [(job["number"], job["state"], job["tries"]) for job in listed] == [(n, "complete", 1) for n in range(2)]
    assert [job["label"] for job in listed] == ["seed=1", "seed=2"]
    assert sorted(job["run_dir"] for job in listed) == [str(path) for path in sorted(runs(tmp_path / "logs"))]
    assert (sweep / "done").exists()
    assert f"runs={sweep}" in done.stdout
    for job in listed:
        made = RunDir(job["run_dir"])
        assert made.config["seed"] == job["number"] + 1
        assert "sweep" not in made.config
        assert made.overrides == [*WORDS, f"seed={job['number'] + 1}"]
        assert job["objective"] == made.result["objective"]
        assert "Run complete" in (made.path / "output.log").read_text()
    check(run(*WORDS, "seed=2", "paths.log_dir=alone", cwd=tmp_path))
    same(Path(listed[1]["run_dir"]), runs(tmp_path / "alone")[0])


def test_what_is_wrong_in_every_job_is_told_before_any_of_them(tmp_path: Path) -> None:
    done = run("-m", *WORDS, "optimizer.lr=-1", "seed=1,2", "optimizer.weight_decay=0,-2", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("Error: optimizer.lr=-1: expected a number above 0 ")
    assert not (tmp_path / "logs").exists()


def test_failed_jobs_are_tried_again_alone(tmp_path: Path) -> None:
    """Seed 2 is killed once, seed 3 at each start, and seed 4 fails until a file is there."""
    parts = (
        "+callbacks.dies={_target_: support.sweep_parts.Dies}",
        "+callbacks.falls={_target_: support.sweep_parts.Falls, seed: 4}",
    )
    checkpoints = "callbacks.checkpoint.every_n_train_steps=5"
    words = ("-m", *WORDS, "seed=2,3,4", "sweep.jobs=2", "sweep.retries=1", checkpoints, *parts)
    done = run(*words, cwd=tmp_path)
    assert done.returncode == 1
    (sweep,) = sweeps(tmp_path / "logs")
    found = [(job["state"], job["tries"]) for job in jobs(sweep)]
    assert found == [("complete", 2), ("failed", 2), ("failed", 2)]
    assert jobs(sweep)[1]["sentence"] == "its process died (SIGKILL, as Linux does where memory is short)."
    assert "no luck" in jobs(sweep)[2]["sentence"]
    assert [trial.state.name for trial in study_of(sweep).trials] == ["COMPLETE", "FAIL", "FAIL"]
    assert done.stderr.splitlines()[-1].startswith("Error: 2 of 3 jobs failed, the first of them (seed=3) with: ")
    check(run(*WORDS, "seed=2", checkpoints, "paths.log_dir=alone", cwd=tmp_path))
    same(Path(jobs(sweep)[0]["run_dir"]), runs(tmp_path / "alone")[0])
    first = runs(tmp_path / "logs")
    (tmp_path / "mended").touch()
    again = run(*words, cwd=tmp_path)
    assert f"Taking up {sweep}, 1 done: 3 jobs" in again.stdout
    found = [(job["state"], job["tries"]) for job in jobs(sweep)]
    assert found == [("complete", 2), ("failed", 4), ("complete", 3)]
    assert runs(tmp_path / "logs") == first  # it resumed in its own directory


@pytest.mark.slow
def test_a_job_that_hangs_is_killed_for_its_silence(tmp_path: Path) -> None:
    more = ("+callbacks.hangs={_target_: support.sweep_parts.Hangs}", "sweep.silence=5")
    done = run("-m", *WORDS, "seed=1,2", *more, cwd=tmp_path)
    assert done.returncode == 1
    (sweep,) = sweeps(tmp_path / "logs")
    assert [job["state"] for job in jobs(sweep)] == ["failed", "complete"]
    assert jobs(sweep)[0]["sentence"] == "killed after sweep.silence=5 seconds without a line."


SENTENCES = {
    "without -m": (["sweep=seeds"], "add -m"),
    "a list of values": (["-m", "optimizer.lr=[0.1,0.2]"], "optimizer.lr="),
    "a word to leave out": (
        ["-m", "seed=1", "sweep=ablation", 'sweep.remove=["model=mpl"]', "model=mlp"],
        "did you mean model=mlp?",
    ),
    "no sweep": (["-m", "seed=1", "sweep.resume=logs/x"], "sweep.resume=logs/x is not the directory of a sweep"),
}


@pytest.mark.law7
@pytest.mark.parametrize("case", SENTENCES)
def test_a_mistake_costs_one_line_and_leaves_nothing(tmp_path: Path, case: str) -> None:
    typed, sentence = SENTENCES[case]
    done = run(*typed, cwd=tmp_path)
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert sentence in done.stderr
    assert not list(tmp_path.rglob("*.yaml"))


@pytest.mark.parametrize("is_deleted", [False, True])
def test_a_job_whose_result_a_kill_left_unrecorded(tmp_path: Path, is_deleted: bool) -> None:
    """A run that was complete is kept; one that `scripts/runs.py delete=unfinished` has deleted is made again."""
    words = ("-m", *WORDS, "sweep.axes={seed: [1]}")
    check(run(*words, cwd=tmp_path))
    (sweep,) = sweeps(tmp_path / "logs")
    (job,) = jobs(sweep)
    forget_since(sweep, '"result0"')
    if is_deleted:
        shutil.rmtree(job["run_dir"])
    check(run(*words, cwd=tmp_path))
    (again,) = jobs(sweep)
    assert (again["state"], [Path(again["run_dir"])]) == ("complete", runs(tmp_path / "logs"))
    assert again["objective"] == job["objective"]
    assert is_deleted or again["run_dir"] == job["run_dir"]
