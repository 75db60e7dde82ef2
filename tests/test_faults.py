"""Faults of real runs: workers that are killed or hang, time limits, slow disks. All tests here are slow."""

import os
import signal
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from support.commands import Started, check, command, environment, run
from support.commands import start as started
from support.runs import ROOT, new_run, rows, runs, weights

from lathe.runs.rundir import RunDir

pytestmark = [pytest.mark.slow, pytest.mark.law3]

# Slow enough for a kill in the middle of an epoch, with dropout, which draws from every rank's generator.
TRAIN = (
    "model=mlp",
    "model.net.width=768",
    "model.net.depth=3",
    "model.net.dropout=0.2",
    "data.batch_size=64",
    "trainer.accelerator=cpu",
    "trainer.devices=2",
    "trainer.max_epochs=3",
    "trainer.log_every_n_steps=1",
    "trainer.enable_progress_bar=false",
    "trainer.enable_model_summary=false",
    "callbacks.throughput=null",
    "callbacks.checkpoint.every_n_train_steps=3",
)


def start(folder: Path, *arguments: str, script: tuple[str, ...] = (), **extra: str) -> Started:
    words = [*script, *arguments] if script else command(*arguments)
    return started(words, ROOT if script else folder, environment(**extra), merged=True, fork_ranks=True)


def wait_for(process: Started, log_dir: Path, lines: int) -> Path:
    """Return the run directory once it has last.ckpt and so many lines of metrics."""
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        for found in runs(log_dir):
            table = found / "metrics.csv"
            if (
                (found / "checkpoints" / "last.ckpt").exists()
                and table.exists()
                and table.read_text().count("\n") > lines
            ):
                return found
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.01)
    raise AssertionError("the run did not come that far")


def workers(parent: int) -> list[int]:
    """Return the ranks: the command's child processes except multiprocessing's helper."""
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return [int(child) for child in children if b"resource_tracker" not in Path(f"/proc/{child}/cmdline").read_bytes()]


def equal(left: Path, right: Path) -> None:
    for name in ("last", "best"):
        ours, theirs = weights(left, name), weights(right, name)
        assert ours.keys() == theirs.keys()
        assert [key for key in ours if not torch.equal(ours[key], theirs[key])] == [], name
    assert rows(left) == rows(right)


# The ranks to kill, by strategy: rank 0 writes checkpoints and logs, the last one has a pipeline's loss.
STRATEGIES = {
    "ddp": (0, 1),
    "fsdp": (0,),
    "deepspeed_2": (1,),
    "deepspeed_3": (0,),
    "tensor": (1,),
    "pipeline": (0,),
    "3d": (1,),
}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_killed_worker_of_either_rank_changes_nothing(tmp_path: Path, strategy: str) -> None:
    if strategy.startswith("deepspeed") and not find_spec("deepspeed"):
        pytest.skip("needs the extra deepspeed")
    arguments = (*TRAIN, f"strategy={strategy}", "callbacks.checkpoint.async=true")
    check(run(*arguments, f"paths.log_dir={tmp_path / 'alone'}", cwd=tmp_path, timeout=400))
    (alone,) = runs(tmp_path / "alone")
    for rank in STRATEGIES[strategy]:
        log_dir = tmp_path / f"rank{rank}"
        process = start(tmp_path, *arguments, "launch.max_restarts=3", f"paths.log_dir={log_dir}")
        try:
            directory = wait_for(process, log_dir, 7 + 20 * rank)
            victims = workers(process.pid)
            assert len(victims) == 2
            os.kill(victims[rank], signal.SIGKILL)
            output, _ = process.communicate(timeout=400)
        finally:
            process.kill()
        assert process.returncode == 0, output
        assert "restart 1 of 3" in output
        equal(alone, directory)


HANG = """
import os, signal, time
from lightning.pytorch.callbacks import Callback
class Hang(Callback):
    def __init__(self, folder, deaf): self.note, self.deaf = os.path.join(folder, "hung"), deaf
    def on_train_batch_start(self, trainer, *_):
        if trainer.global_rank == 1 and trainer.global_step == 7 and not os.path.exists(self.note):
            open(self.note, "w").close()
            if not self.deaf: signal.signal(signal.SIGTERM, signal.SIG_DFL)
            time.sleep(600)
"""


@pytest.mark.parametrize("restarts", [0, 1])
def test_a_worker_that_hangs_in_training_is_ended(tmp_path: Path, restarts: int) -> None:
    """Also one that ignores SIGTERM, which the agent kills 30 seconds later."""
    (tmp_path / "hang.py").write_text(HANG)
    log_dir = tmp_path / "logs"
    done = run(
        *TRAIN,
        "launch.timeout=5",
        f"launch.max_restarts={restarts}",
        "+callbacks.hang._target_=hang.Hang",
        f"+callbacks.hang.folder={tmp_path}",
        f"+callbacks.hang.deaf={restarts > 0}",
        f"paths.log_dir={log_dir}",
        cwd=tmp_path,
        PYTHONPATH=str(tmp_path),
    )
    (directory,) = runs(log_dir)
    told = (
        "rank 0 waited longer than launch.timeout=5 seconds in the gradients' all_reduce (step 7): rank 1 did not come"
    )
    if restarts:
        check(done)
        assert f"{told}: restart 1 of 1, from the last checkpoint." in done.stdout
        assert [int(row["step"]) for row in rows(directory) if row["train/loss"]] == list(range(1, 61))
    else:
        assert done.returncode == 1
        (line,) = done.stderr.splitlines()
        assert line == (
            f"Error: {told} (if it was only slow, raise launch.timeout), and launch.max_restarts=0 leaves no restart: "
            f"continue with resume={directory}, or set launch.max_restarts."
        )


def fakes(folder: Path, tasks: int) -> dict[str, str]:
    """Fake srun and scontrol for train.sbatch: tasks with SLURM's environment; requeues are recorded."""
    (folder / "bin").mkdir()
    srun = f"""#!/bin/bash
while [[ "$1" == --* ]]; do shift; done
export SLURM_NTASKS={tasks} SLURM_NTASKS_PER_NODE=1 SLURM_LOCALID=0 SLURM_STEP_ID=0 SLURM_NODELIST=localhost
pids=()
for ((i = 0; i < {tasks}; i++)); do SLURM_PROCID=$i "$@" & pids+=($!); done
trap 'kill -USR1 "${{pids[@]}}"' USR1
code=0
for pid in "${{pids[@]}}"; do
    wait $pid; one=$?
    while kill -0 $pid 2>/dev/null; do wait $pid; one=$?; done
    wait $pid; one=$?
    ((one > code)) && code=$one
done
exit $code
"""
    for name, text in (("srun", srun), ("scontrol", f'#!/bin/bash\necho "$*" >> {folder}/requeued\n')):
        (folder / "bin" / name).write_text(text)
        (folder / "bin" / name).chmod(0o755)
    path = f"{folder / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {"PATH": path, "SLURM_JOB_ID": str(os.getpid()), "SLURM_JOB_NAME": "train", "SLURM_NNODES": str(tasks)}


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_job_whose_time_is_up_is_requeued_and_goes_on(tmp_path: Path, nodes: int) -> None:
    arguments = [*TRAIN, f"trainer.devices={2 // nodes}", f"paths.log_dir={tmp_path / 'logs'}"]
    script = ("bash", str(ROOT / "scripts/slurm/train.sbatch"))
    variables: dict[str, Any] = fakes(tmp_path, nodes)
    process = start(tmp_path, *arguments, script=script, **variables)
    directory = wait_for(process, tmp_path / "logs", 7)
    process.send_signal(signal.SIGUSR1)
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 0, output
    assert "stopped by SIGUSR1" in output
    assert (tmp_path / "requeued").read_text() == f"requeue {os.getpid()}\n"
    process = start(tmp_path, *arguments, script=script, SLURM_RESTART_COUNT="1", **variables)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    assert f"Continuing {directory}" in output
    assert runs(tmp_path / "logs") == [directory]
    check(run(*TRAIN, f"paths.log_dir={tmp_path / 'alone'}", cwd=tmp_path))
    equal(runs(tmp_path / "alone")[0], directory)
    assert (tmp_path / "requeued").read_text().count("\n") == 1


def test_a_sweep_through_submitit_leaves_a_directory_per_job(tmp_path: Path) -> None:
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    arguments = (
        "-m",
        "seed=1,2",
        *TRAIN,
        "trainer.max_epochs=1",
        "model.net.width=16",
        "hydra/launcher=submitit_local",
    )
    check(run(*arguments, cwd=tmp_path))
    assert [(path / "result.json").exists() for path in runs(tmp_path / "logs")] == [True, True]


@pytest.mark.slow
def test_the_ranks_of_torchrun_end_where_the_run_is_complete(tmp_path: Path) -> None:
    """Ranks that wait for rank 0's configuration would otherwise wait for ever."""
    cfg = new_run(tmp_path, *TRAIN, "strategy=ddp")
    RunDir(cfg["paths"]["run_dir"]).finish({"steps": 1, "seconds": 1.0, "objective": 0.5})
    torchrun = (
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node=2",
        str(ROOT / "train.py"),
    )
    process = start(tmp_path, f"resume={cfg['paths']['run_dir']}", script=torchrun)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    assert output.count("is complete; raise trainer.max_epochs to train it further.") == 1
