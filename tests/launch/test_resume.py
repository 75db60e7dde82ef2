"""Runs found by path, resumed with a later end or after Ctrl-C, and shared by the ranks of torchrun."""

import json
import shlex
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from support.commands import command as typed
from support.commands import start
from support.runs import ROOT, SMALL, new_run, runs
from support.typed import Command

from lathe.launch import launcher as launching
from lathe.launch.external_launch import ExternalLaunch
from lathe.runs.rundir import RunDir
from lathe.training.final_evaluation import proposals
from lathe.training.train import train


def test_a_file_of_the_users_own_that_changed_is_named_on_resume_and_evaluate(command: Command, broken: RunDir) -> None:
    facts = broken.path / "environment.json"
    facts.write_text(json.dumps({**broken.environment, "own_files": {"mine/lit.py": "0"}}))
    for words, name in (([f"resume={broken.path}"], "train"), ([f"run={broken.path}"], "evaluate")):
        with pytest.warns(UserWarning, match=r"changed since this run began: src/mine/lit\.py\.$"):
            command(*words, name=name)


def test_a_checkpoint_in_the_place_of_its_run_is_answered_with_the_run(
    command: Command, broken: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    broken.last.parent.mkdir()
    broken.last.touch()
    told = command.fails(f"resume={broken.last}", capsys=capsys)
    assert told == f"resume={broken.last} is a checkpoint; expected its run: resume={broken.path}."


def finished(command: Command, *typed: str, **result: int) -> RunDir:
    command("model=mlp", *typed)
    (run,) = command.runs
    run.finish({**run.result, **result})
    (run.path / "checkpoints").mkdir()
    run.last.touch()
    return run


def test_a_continuation_that_fails_changes_nothing_before_it_begins(
    command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that began stays unfinished, also if metrics.csv keeps its inode, as may happen when it is replaced twice."""
    run = finished(command, steps=5, epochs=30)
    before = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
    longer = (f"resume={run.path}", "trainer.max_epochs=40")
    assert command.fails(*longer, job="support.agent_jobs:never_begins", capsys=capsys) == "it never began."
    assert {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()} == before
    assert command.fails(*longer, job="support.agent_jobs:breaks_off", capsys=capsys) == "it broke off."
    assert not run.complete
    assert run.config["trainer"]["max_epochs"] == 40


def test_the_commands_of_a_run_contain_what_a_resume_changed(command: Command) -> None:
    """Its first end and its tags may come from a file that it chose."""
    run = finished(command, epochs=30)
    for end in (40, 50):
        command(f"resume={run.path}", f"trainer.max_epochs={end}", "tags=[longer]")
    assert not {"trainer.max_epochs=40", f"resume={run.path}"} & set(run.overrides)
    assert all(
        {"trainer.max_epochs=50", "tags=[longer]"} < set(shlex.split(line))
        for line in proposals(run, run.config, run.result)[:2]
    )


def test_the_end_that_counts_is_raised(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    run = finished(command, "trainer.max_time=00:00:00:10", steps=5, epochs=2)
    command(f"resume={run.path}")
    assert "is complete; raise trainer.max_time to train it further." in capsys.readouterr().out
    assert "trainer.max_time ended this run" in command.fails(
        f"resume={run.path}", "trainer.max_epochs=40", capsys=capsys
    )
    assert "trainer.max_time: " in command.fails(f"resume={run.path}", "trainer.max_time=00:00:00:09", capsys=capsys)
    assert run.config["trainer"]["max_time"] == "00:00:00:10"
    assert "trainer.max_time=00:00:00:10" in run.overrides
    command(f"resume={run.path}", "trainer.max_time=00:00:01:00")
    assert run.config["trainer"]["max_time"] == "00:00:01:00"


def test_a_folder_of_data_is_found_from_elsewhere(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "photos" / "cat").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    data = ("data=image_folder", "data.folder=photos")
    run = finished(command, *data, "trainer.max_epochs=30", epochs=30)
    monkeypatch.chdir("/")
    command(f"resume={run.path}", "trainer.max_epochs=40")
    assert run.config["trainer"]["max_epochs"] == 40
    assert run.config["data"]["folder"] == run.config["data"]["source"]["folder"] == str(tmp_path / "photos")
    told = command.fails(f"resume={run.path}", "data=image_folder", f"data.folder={tmp_path}", capsys=capsys)
    assert f"data.folder: {tmp_path / 'photos'} -> {tmp_path}" in told


def test_a_complete_run_without_its_last_state_is_not_trained_from_the_start(
    command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    run = finished(command, steps=5, epochs=30)
    run.last.unlink()
    assert "last.ckpt is missing" in command.fails(f"resume={run.path}", "trainer.max_epochs=40", capsys=capsys)
    (run.path / "overrides.yaml").unlink()
    assert "its overrides.yaml is missing" in command.fails(
        f"resume={run.path}", "trainer.max_epochs=40", capsys=capsys
    )


# torchrun and srun


TWO = ("trainer.accelerator=cpu", "trainer.devices=2")


def test_under_srun_with_a_task_on_each_node_the_agent_counts(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher's two tasks are two agents with two processes each: their count is not the run's."""
    for key, value in (("MASTER_ADDR", "localhost"), ("MASTER_PORT", "12345"), ("SLURM_NNODES", "2")):
        monkeypatch.setenv(key, value)
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(launching, "detect_external_launch", lambda: ExternalLaunch("slurm:99", 0, 0, 2, False))
    monkeypatch.setattr(
        launching, "run_job", lambda job, cfg, processes, options, nodes: asked.append((processes, nodes.most)) or {}
    )
    command("launch.nodes=2", "trainer.num_nodes=2", *TWO, "data.batch_size=64")
    assert asked == [(2, 2)]


class Wire:
    """A stand-in for the process group of two ranks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.box: list[Any] = []

        def broadcast(outer: ExternalLaunch, own: Any, sent: Any = None) -> Any:
            if outer.rank == 0:
                self.box.append(sent)
            return self.box[-1]

        monkeypatch.setattr(ExternalLaunch, "broadcast", broadcast)
        self.patch = monkeypatch

    def rank(self, rank: int, launch_id: str = "torchrun:1", restarted: bool = False) -> None:
        self.patch.setattr(
            launching, "detect_external_launch", lambda: ExternalLaunch(launch_id, rank, rank, 2, restarted)
        )


def test_ranks_of_torchrun_return_when_the_run_is_complete(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    wire = Wire(monkeypatch)
    wire.rank(0)
    command(*TWO)
    (run,) = command.runs
    for rank in (0, 1):
        wire.rank(rank)
        command(f"resume={run.path}", job="support.agent_jobs:never_begins")
    assert wire.box[-1] is None


def test_a_restart_of_torchrun_finds_its_run(
    command: Command, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wire = Wire(monkeypatch)
    for launch_id in ("torchrun:1", "torchrun:2"):
        wire.rank(0, launch_id)
        command.fails(*TWO, job="support.agent_jobs:breaks_off", capsys=capsys)
    first = next(run for run in command.runs if run.environment["launch_id"] == "torchrun:1")
    wire.rank(0, "torchrun:1", restarted=True)
    command(*TWO)
    assert len(command.runs) == 2
    assert [run.path for run in command.runs if run.complete] == [first.path]


@pytest.mark.slow
def test_of_several_commands_at_the_same_moment_one_trains_and_the_others_say_so(tmp_path: Path) -> None:
    more = ("model.net.width=512", "trainer.max_epochs=4", "trainer.log_every_n_steps=1", "resume=auto")
    processes = [start(typed(*SMALL, *more), tmp_path) for _ in range(3)]
    told = [process.communicate(timeout=240) for process in processes]
    (directory,) = runs(tmp_path / "logs")
    assert sorted(process.returncode for process in processes) == [0, 1, 1], told
    refused = f"Error: resume=auto: another process is at {directory}: wait for it, or leave resume out.\n"
    assert [errors for _, errors in told].count(refused) == 2
    assert (directory / "result.json").exists()


@pytest.mark.slow
def test_an_interrupted_run_prints_how_to_resume(tmp_path: Path) -> None:
    """Also after two Ctrl-C."""
    words = [word for word in SMALL if not word.startswith("trainer.max_epochs")]
    process = start(typed(*words, "trainer.max_epochs=100000"), tmp_path)
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob("logs/*/*/checkpoints/last.ckpt")) and time.monotonic() < deadline:
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    (run,) = runs(tmp_path / "logs")
    assert process.returncode == 130, errors
    assert (
        errors.splitlines()[-1] == f"Error: stopped by SIGINT; continue with: python {ROOT / 'train.py'} resume={run}"
    )
    assert "Traceback" not in errors
    assert not (run / "result.json").exists()


@pytest.mark.slow
def test_a_run_that_its_time_limit_ended_continues_with_more(tmp_path: Path) -> None:
    cfg = new_run(tmp_path, *SMALL, "trainer.max_epochs=100000", "trainer.max_time=00:00:00:01")
    steps = train(cfg)["steps"]
    assert train(cfg)["steps"] == steps  # resumed to its end
    cfg["trainer"]["max_time"] = "00:00:00:04"
    assert train(cfg)["steps"] > steps
