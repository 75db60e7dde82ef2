"""What several tests need: a composed configuration, a run in this process, a run of the real command."""

import csv
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from forked import Command
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra

from lathe import rundir
from lathe.config import resolve

ROOT = Path(__file__).parent.parent
Started = Command | subprocess.Popen[str]
# What the names begin with of variables that count when something is imported.
AT_START = ("PYTHON", "OMP_", "TORCH", "CUDA_", "LD_")
SMALL = ("model=mlp", "model.net.width=16", "model.net.depth=1", "trainer.accelerator=cpu", "trainer.enable_progress_bar=false",
         "trainer.enable_model_summary=false", "trainer.max_epochs=2", "data.batch_size=64", "trainer.log_every_n_steps=5")  # fmt: skip


def config(*overrides: str, name: str = "train") -> dict[str, Any]:
    """The resolved configuration of these overrides, as the launch hands it to ranks."""
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        return resolve(compose(name, overrides=list(overrides)))


def new_run(log_dir: Path, *overrides: str) -> dict[str, Any]:
    """A configuration with a fresh run directory below `log_dir`."""
    cfg = config(*overrides, f"paths.log_dir={log_dir}")
    rundir.create(log_dir, cfg, list(overrides))
    return cfg


def command(*arguments: str, script: str = "train.py") -> list[str]:
    return [sys.executable, str(ROOT / script), *arguments]


def environment(**extra: str) -> dict[str, str]:
    """This process's environment without what a launcher or CI may have left in it."""
    drop = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "HYDRA_FULL_ERROR", "LATHE_FULL_ERROR")
    kept = {
        key: value
        for key, value in os.environ.items()
        if key not in drop and not key.startswith(("TORCHELASTIC", "SLURM_", "HOROVOD"))
    }
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "", **extra}


def run(
    *arguments: str, cwd: Path, script: str = "train.py", timeout: float = 240, **extra: str
) -> subprocess.CompletedProcess[str]:
    """Runs the real command in `cwd` and returns what it printed."""
    process = start(command(*arguments, script=script), cwd, environment(**extra))
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return subprocess.CompletedProcess(process.args, process.wait(), out, err)


def start(
    line: list[str], cwd: str | Path, env: dict[str, str] | None = None, merged: bool = False, session: bool = False
) -> Started:
    """Starts a command line with its output piped: forked, or by Python anew where the environment says what Python or a package does when
    it is imported. For `merged` and `session` see `Command`."""
    env = environment() if env is None else env
    same = all(env.get(name, "") == os.environ.get(name, "") for name in {*env, *os.environ} if name.startswith(AT_START))
    if same and line[0] == sys.executable and line[1].endswith(".py"):
        return Command(line, cwd, env, merged, session)
    errors = subprocess.STDOUT if merged else subprocess.PIPE
    return subprocess.Popen(line, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=session)


def in_process(script: str, *arguments: str) -> int:
    """Runs a script's main in this process as if the arguments had been typed here; returns its exit code."""
    before, sys.argv = sys.argv, [str(ROOT / script), *arguments]
    GlobalHydra.instance().clear()
    try:
        runpy.run_path(str(ROOT / script), run_name="__main__")
    except SystemExit as stop:
        return int(stop.code or 0)
    finally:
        sys.argv = before
    return 0


def check(done: subprocess.CompletedProcess[str]) -> subprocess.CompletedProcess[str]:
    """Asserts that the command succeeded, showing its output if not."""
    assert done.returncode == 0, f"{done.args}\n{done.stdout}\n{done.stderr}"
    return done


def runs(log_dir: Path) -> list[Path]:
    """All run directories below `log_dir`, oldest first."""
    return sorted(path.parent for path in log_dir.glob("*/*/config.yaml") if not path.parent.is_symlink())


def weights(run_dir: Path, name: str = "last") -> dict[str, torch.Tensor]:
    """The weights in a checkpoint of a run."""
    return dict(torch.load(run_dir / "checkpoints" / f"{name}.ckpt", weights_only=True)["state_dict"])


def rows(run_dir: Path) -> list[dict[str, str]]:
    """The lines of metrics.csv."""
    with open(run_dir / "metrics.csv", newline="") as file:
        return list(csv.DictReader(file))


def column(run_dir: Path, name: str) -> list[float]:
    """The figures of one column of metrics.csv, in order."""
    return [float(row[name]) for row in rows(run_dir) if row.get(name)]
