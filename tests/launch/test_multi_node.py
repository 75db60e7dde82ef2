"""Several machines under one launch, simulated by two agents on loopback."""

import json
import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest
from support.commands import Started, check, command, run
from support.commands import start as started
from support.runs import SMALL, rows, runs, weights

from lathe.config.compose import composing
from lathe.config.resolve import resolve
from lathe.errors import UserError
from lathe.launch.command_checks import launch_checks
from lathe.launch.devices import Nodes, read_nodes
from lathe.launch.external_launch import ExternalLaunch
from lathe.launch.launcher import _find_previous
from lathe.runs.rundir import RunDir


def options(**given: Any) -> dict[str, Any]:
    return {"nodes": 1, "endpoint": None, "id": None, "max_restarts": 0, **given}


MEET = {"endpoint": "host7:29400", "id": "big-run"}


@pytest.mark.parametrize(
    ("given", "begins", "names"),
    [
        ({"nodes": "4:2"}, "launch.nodes=4:2: expected", "min:max"),
        ({"nodes": 2, "id": "a"}, "launch.nodes=2", "launch.endpoint=host:port"),
        ({"endpoint": "host:1"}, "launch.endpoint=host:1 has no effect", "launch.nodes"),
        ({"nodes": "1:2", **MEET}, "launch.nodes=1:2", "launch.max_restarts"),
    ],
)
def test_nodes_that_can_not_meet_are_refused(given: dict[str, Any], begins: str, names: str) -> None:
    with pytest.raises(UserError) as caught:
        read_nodes(options(**given))
    assert str(caught.value).startswith(begins)
    assert names in str(caught.value)


def test_srun_with_a_task_on_each_node_gives_place_and_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for key, value in (("MASTER_ADDR", "node3"), ("MASTER_PORT", "12345"), ("SLURM_NNODES", "2")):
        monkeypatch.setenv(key, value)
    srun = ExternalLaunch("slurm:99", 1, 0, 2, False)
    assert read_nodes(options(nodes=2), srun) == Nodes(2, 2, "node3:12345", "slurm-99")
    assert read_nodes(options(nodes=2, **MEET), srun) == Nodes(2, 2, "host7:29400", "big-run")
    for outer in (ExternalLaunch("slurm:99", 1, 0, 4, False), ExternalLaunch("torchrun:99", 1, 0, 2, False)):
        with pytest.raises(UserError, match=r"^launch\.nodes=2 starts the ranks itself, but a launcher started"):
            read_nodes(options(nodes=2), outer)
    with pytest.raises(UserError, match=r"^launch\.id=a has no effect under torchrun or srun"):
        read_nodes(options(id="a"), srun)


def test_the_machines_of_a_launch_share_a_directory_and_others_are_kept_out(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    with run.locked(shared=True), run.locked(shared=True):
        assert run.busy
        with pytest.raises(UserError, match="is being written to by another process"), run.locked():
            pass
    assert not run.busy
    with run.locked(), pytest.raises(UserError, match="is being written to"), run.locked(shared=True):
        pass


def test_a_node_that_creates_the_run_checks_what_keys_mean_together(tmp_path: Path) -> None:
    """srun's tasks beyond the first expect to join a run, which brings a checked configuration."""
    nodes, words = Nodes(2, 2, "host7:29400", "big-run"), ["ckpt_mode=trainer", f"paths.log_dir={tmp_path}"]
    with composing("train", words) as cfg, pytest.raises(UserError, match="ckpt_mode=trainer"):
        _find_previous(cfg, resolve(cfg), None, nodes, launch_checks(None))


# real agents

TRAIN = (*SMALL, "trainer.log_every_n_steps=1", "callbacks.throughput=null")


def endpoint() -> str:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return f"localhost:{free.getsockname()[1]}"


def start(folder: Path, *arguments: str) -> Started:
    return started(command(*arguments), folder, merged=True)


@pytest.mark.slow
def test_two_nodes_are_two_devices(tmp_path: Path) -> None:
    arguments = (*TRAIN, "launch.nodes=2", f"launch.endpoint={endpoint()}", "launch.id=pair")
    agents = [start(tmp_path, *arguments, f"seed={seed}") for seed in (1, 1)]
    outputs = [agent.communicate(timeout=300)[0] for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], outputs
    (directory,) = runs(tmp_path / "logs")
    assert sorted("Joining" in output for output in outputs) == [False, True]
    assert json.loads((directory / "environment.json").read_text())["launch_id"] == "pair"
    assert json.loads((directory / "result.json").read_text())["devices"] == 2
    check(run(*TRAIN, "seed=1", "trainer.devices=2", f"paths.log_dir={tmp_path / 'one'}", cwd=tmp_path))
    (one,) = runs(tmp_path / "one")
    assert rows(directory) == rows(one)
    ours, theirs = weights(directory), weights(one)
    assert all(ours[key].equal(theirs[key]) for key in theirs)
    done = run(*arguments, "seed=1", cwd=tmp_path)  # a node that comes too late
    assert f"{directory} is complete" in done.stdout
    done = run(*arguments, "seed=2", cwd=tmp_path)
    assert done.stderr == f"Error: launch.id=pair is the name of {directory}, which is complete. Choose another.\n"
    assert runs(tmp_path / "logs") == [directory]


@pytest.mark.slow
def test_training_continues_without_a_lost_node(tmp_path: Path) -> None:
    arguments = (
        *TRAIN,
        "model.net.width=1024",
        "model.net.depth=3",
        "callbacks.checkpoint.every_n_train_steps=3",
        "launch.nodes=1:2",
        f"launch.endpoint={endpoint()}",
        "launch.id=elastic",
        "launch.max_restarts=3",
        "launch.last_call_timeout=8",
    )
    first = start(tmp_path, *arguments)
    while not (tmp_path / "logs").exists():
        time.sleep(0.05)
    time.sleep(3)  # so that the first hosts the rendezvous
    second = start(tmp_path, *arguments)
    try:
        while not list(tmp_path.glob("logs/*/*/checkpoints/last.ckpt")):
            assert first.poll() is None
            assert second.poll() is None
            time.sleep(0.02)
        os.kill(second.pid, signal.SIGKILL)
        output, _ = first.communicate(timeout=300)
    finally:
        first.kill()
        second.kill()
        second.communicate()
    assert first.returncode == 0, output
    assert "A worker died: restart 1 of 3, from the last checkpoint." in output
    (directory,) = runs(tmp_path / "logs")
    assert json.loads((directory / "result.json").read_text())["devices"] == 1
    steps = [int(row["step"]) for row in rows(directory) if row["train/loss"]]
    assert steps == list(range(1, 41))
