"""Faults of real runs: workers that are killed or hang, time limits, slow disks. All tests here are slow."""

import os
import signal
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from support.commands import Started, check, command, environment, run
from support.commands import start as started
from support.interruptions import same
from support.runs import QUIET, ROOT, new_run, rows, runs

from lathe.runs.rundir import RunDir

pytestmark = [pytest.mark.slow, pytest.mark.law3]

# Slow enough for a kill in the middle of an epoch, with dropout, which draws from every rank's generator.
TRAIN = (
    *("model=mlp", "model.net.width=768", "model.net.depth=3", "model.net.dropout=0.2", "data.batch_size=64", *QUIET),
    *("trainer.devices=2", "trainer.max_epochs=2", "trainer.log_every_n_steps=1", "callbacks.throughput=null"),
    "callbacks.checkpoint.every_n_train_steps=3",
)


def start(folder: Path, *arguments: str, script: tuple[str, ...] = (), **extra: str) -> Started:
    words = [*script, *arguments] if script else command(*arguments)
    return started(words, ROOT if script else folder, environment(**extra), merged=True, fork_ranks=True)


def wait_for(process: Started, log_dir: Path, lines: int) -> Path:
    """Return the run directory once it has last.ckpt and so many lines of metrics."""
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        for path in runs(log_dir):
            table = path / "metrics.csv"
            has_lines = table.exists() and table.read_text().count("\n") > lines
            if has_lines and (path / "checkpoints" / "last.ckpt").exists():
                return path
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.01)
    raise AssertionError("the run did not come that far")


def workers(parent: int) -> list[int]:
    """Return the ranks: the command's child processes except multiprocessing's helper."""
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return [int(child) for child in children if b"resource_tracker" not in Path(f"/proc/{child}/cmdline").read_bytes()]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing disturbs, on two processes (strategy=auto is ddp)."""
    folder = tmp_path_factory.mktemp("undisturbed")
    check(run(*TRAIN, cwd=folder))
    return runs(folder / "logs")[0]


# The ranks to kill, by strategy: rank 0 writes checkpoints and logs, the last one has a pipeline's loss. tests/laws
# kills a whole run under fsdp, which shards as tensor does; 3d on two devices is a pipeline.
STRATEGIES = {"ddp": (0, 1), "deepspeed_3": (0,), "pipeline": (0,)}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_killed_worker_of_either_rank_changes_nothing(tmp_path: Path, strategy: str, undisturbed: Path) -> None:
    if strategy.startswith("deepspeed") and not find_spec("deepspeed"):
        pytest.skip("needs the extra deepspeed")
    arguments, alone = (*TRAIN, f"strategy={strategy}", "callbacks.checkpoint.async=true"), undisturbed
    if strategy != "ddp":
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
        same(alone, directory)


HANG = """
import os, signal, time
from lightning.pytorch.callbacks import Callback
class Hang(Callback):
    def __init__(self, folder): self.note = os.path.join(folder, "hung")
    def on_train_batch_start(self, trainer, *_):
        if trainer.global_rank == 1 and trainer.global_step == 7 and not os.path.exists(self.note):
            open(self.note, "w").close()
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            time.sleep(600)
"""


def test_a_worker_that_hangs_in_training_is_started_again(tmp_path: Path) -> None:
    """See launch/test_elastic.py for the sentence where no restart is left."""
    (tmp_path / "hang.py").write_text(HANG)
    words = ("launch.timeout=5", "launch.max_restarts=1", f"paths.log_dir={tmp_path / 'logs'}")
    hang = ("+callbacks.hang._target_=hang.Hang", f"+callbacks.hang.folder={tmp_path}")
    done = check(run(*TRAIN, *words, *hang, cwd=tmp_path, PYTHONPATH=str(tmp_path)))
    assert "rank 0 waited longer than launch.timeout=5 seconds in the gradients' all_reduce (step 7)" in done.stdout
    assert "rank 1 did not come: restart 1 of 1, from the last checkpoint." in done.stdout
    (directory,) = runs(tmp_path / "logs")
    assert [int(row["step"]) for row in rows(directory) if row["train/loss"]] == list(range(1, 41))


def fakes(folder: Path, tasks: int) -> dict[str, Any]:
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


def test_a_job_whose_time_is_up_is_requeued_and_goes_on(tmp_path: Path, undisturbed: Path) -> None:
    """On two nodes."""
    arguments = [*TRAIN, "trainer.devices=1", f"paths.log_dir={tmp_path / 'logs'}"]
    script = ("bash", str(ROOT / "scripts/slurm/train.sbatch"))
    variables = fakes(tmp_path, 2)
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
    same(undisturbed, directory)
    assert (tmp_path / "requeued").read_text().count("\n") == 1


def test_a_sweep_through_submitit_leaves_a_directory_per_job(tmp_path: Path) -> None:
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    short = ("trainer.max_epochs=1", "model.net.width=16", "trainer.devices=1")
    check(run("-m", "seed=1,2", *TRAIN, *short, "hydra/launcher=submitit_local", cwd=tmp_path))
    assert [(path / "result.json").exists() for path in runs(tmp_path / "logs")] == [True, True]


def test_the_ranks_of_torchrun_end_where_the_run_is_complete(tmp_path: Path) -> None:
    """Ranks that wait for rank 0's configuration would otherwise wait for ever."""
    cfg = new_run(tmp_path, *TRAIN, "strategy=ddp")
    RunDir(cfg["paths"]["run_dir"]).finish({"steps": 1, "seconds": 1.0, "objective": 0.5})
    words = ("torch.distributed.run", "--standalone", "--nproc_per_node=2", str(ROOT / "train.py"))
    torchrun = (sys.executable, "-m", *words)
    process = start(tmp_path, f"resume={cfg['paths']['run_dir']}", script=torchrun)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    assert output.count("is complete; raise trainer.max_epochs to train it further.") == 1
