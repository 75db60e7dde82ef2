"""Runs of a report: in every state, of sweeps and of several tasks. tests/runs/test_run_discovery.py has the search."""

import os
from pathlib import Path

import pytest
from support.run_directories import write_run, write_sweep

from lathe.errors import UserError
from lathe.verbs.report.assemble import check_tasks
from lathe.verbs.runs.reader import find_runs


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_an_unfinished_run_names_the_command_that_continues_it(tmp_path: Path) -> None:
    old, begun = write_run(tmp_path, 0), write_run(tmp_path, 1)
    (old / ".lock").unlink()
    os.utime(old, (0, 0))
    os.utime(old / "metrics.csv", (0, 0))
    (begun / "checkpoints").mkdir()
    (begun / "checkpoints" / "last.ckpt").touch()
    first, second = find_runs(str(tmp_path))
    assert (first.state, second.state, first.sentence) == ("unfinished", "unfinished", None)
    assert second.sentence == f"python train.py resume={begun.relative_to(tmp_path)} continues it."
    assert not (old / ".lock").exists()  # a report writes nothing there


def test_a_sweep_is_its_jobs_with_those_that_left_nothing(tmp_path: Path) -> None:
    done, pruned, died = (write_run(tmp_path, number, accuracy) for number, accuracy in enumerate((0.9, 0.5, None)))
    (pruned / "result.json").unlink()
    jobs = [
        {"run_dir": str(done)},
        {"run_dir": str(pruned), "state": "pruned"},
        {"run_dir": str(died), "state": "failed", "sentence": "the loss is not finite"},
        {"overrides": ["optimizer.lr=-1", "seed=7"], "state": "refused", "sentence": "optimizer.lr=-1: no"},
        {"state": "waiting"},
        {"run_dir": str(tmp_path / "train" / "gone"), "state": "complete"},
        {"run_dir": str(tmp_path / "train" / "lost"), "state": "failed", "sentence": "out of memory"},
    ]
    sweep = write_sweep(tmp_path, jobs)
    runs = find_runs(str(sweep))
    states = ["complete", "pruned", "failed", "failed", "waiting", "gone", "failed"]
    assert [(run.number, run.state) for run in runs] == list(enumerate(states))
    assert runs[2].sentence == "the loss is not finite"
    assert runs[6].sentence == "out of memory"  # the cause of the failure takes precedence over "gone"
    assert (runs[3].label, runs[3].seed) == (f"sweeps/{sweep.name}/jobs/00003.json", "7")
    assert runs[3].command() == "python train.py optimizer.lr=-1 seed=7"
    assert len(find_runs(str(tmp_path))) == 7  # the folder of both: no run is counted twice


def test_what_holds_no_runs_is_refused(tmp_path: Path) -> None:
    write_run(tmp_path / "logs", 0, 0.9)
    (tmp_path / "logs" / "other" / "lightning_logs" / "version_0").mkdir(parents=True)
    with pytest.raises(UserError, match=r"there is no such folder; did you mean train\?"):
        find_runs("logs/trian")
    with pytest.raises(UserError, match="it has no run directory"):
        find_runs("logs/other")


def test_runs_of_several_tasks_are_refused_unless_that_is_what_is_asked(tmp_path: Path) -> None:
    write_run(tmp_path, 0, 0.9)
    other = write_run(tmp_path, 1, 0.9)
    text = (other / "config.yaml").read_text()
    (other / "config.yaml").write_text(text.replace("ClassificationTask", "LanguageModellingTask"))
    runs = find_runs(str(tmp_path))
    expected = r"^runs: these are of 2 tasks \(ClassificationTask of 1, LanguageModellingTask of 1\)\. Name runs of one"
    with pytest.raises(UserError, match=expected):
        check_tasks(runs, None)
    check_tasks(runs, ["task._target_"])
