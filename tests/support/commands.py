"""Runs the project's scripts as commands, in a separate process or in this one."""

import os
import runpy
import signal
import subprocess
import sys
import threading
from pathlib import Path

from hydra.core.global_hydra import GlobalHydra

from support.processes import Command
from support.runs import ROOT

Started = Command | subprocess.Popen[str]
# Prefixes of variables that count at import time.
AT_START = ("PYTHON", "OMP_", "TORCH", "CUDA_", "LD_")
# Prefixes of a launcher's variables, which count later; torch's agent leaves one in its process.
LAUNCHERS = ("TORCHELASTIC", "SLURM_", "HOROVOD")
# True starts every command as a new Python: CUDA does not survive a fork.
anew = False


def command(*arguments: str, script: str = "train.py") -> list[str]:
    return [sys.executable, str(ROOT / script), *arguments]


def environment(**extra: str) -> dict[str, str]:
    """Return this process's environment without variables of a launcher or CI."""
    drop = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "HYDRA_FULL_ERROR", "LATHE_FULL_ERROR")
    kept = {key: value for key, value in os.environ.items() if key not in drop and not key.startswith(LAUNCHERS)}
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "", **extra}


def run(
    *arguments: str, cwd: Path, script: str = "train.py", timeout: float = 240, **extra: str
) -> subprocess.CompletedProcess[str]:
    """Run the real command in `cwd`, and return its output."""
    process = start(command(*arguments, script=script), cwd, environment(**extra), fork_ranks=True)
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return subprocess.CompletedProcess(process.args, process.wait(), out, err)


def start(
    line: list[str],
    cwd: str | Path,
    env: dict[str, str] | None = None,
    merged: bool = False,
    session: bool = False,
    fork_ranks: bool = False,
) -> Started:
    """Start a command: forked, or as a new Python if it has import-time variables. See `Command` for options."""
    env = environment() if env is None else env
    later = (*LAUNCHERS, "PYTHONPATH") if fork_ranks else LAUNCHERS  # a command searches its own path, forked or not
    at_start = {name for name in {*env, *os.environ} if name.startswith(AT_START) and not name.startswith(later)}
    same = all(env.get(name, "") == os.environ.get(name, "") for name in at_start)
    if same and not anew and line[0] == sys.executable and line[1].endswith(".py"):
        return Command(line, cwd, env, merged, session, fork_ranks)
    errors = subprocess.STDOUT if merged else subprocess.PIPE
    return subprocess.Popen(
        line, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=session
    )


def in_process(script: str, *arguments: str) -> int:
    """Run a script's main in this process with these arguments; return its exit code."""
    before, sys.argv = sys.argv, [str(ROOT / script), *arguments]
    handler = signal.getsignal(signal.SIGINT)
    GlobalHydra.instance().clear()
    try:
        runpy.run_path(str(ROOT / script), run_name="__main__")
    except SystemExit as stop:
        return int(stop.code or 0)
    finally:
        sys.argv = before
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, handler)
    return 0


def check(done: subprocess.CompletedProcess[str]) -> subprocess.CompletedProcess[str]:
    """Assert that the command succeeded, showing its output if not."""
    assert done.returncode == 0, f"{done.args}\n{done.stdout}\n{done.stderr}"
    return done


def forget(package: str) -> None:
    """Remove a test's package from this process, for the next test with a package of that name."""
    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        del sys.modules[name]
