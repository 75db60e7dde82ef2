"""Scripts of the project run as commands: in a process of their own, or in this one."""

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
# What the names begin with of variables that count when something is imported.
AT_START = ("PYTHON", "OMP_", "TORCH", "CUDA_", "LD_")
# What those of a launcher begin with, which count later; torch's agent leaves one of them in a process that it ran in.
LAUNCHERS = ("TORCHELASTIC", "SLURM_", "HOROVOD")
# Whether every command starts Python anew: CUDA does not survive a fork.
anew = False


def command(*arguments: str, script: str = "train.py") -> list[str]:
    return [sys.executable, str(ROOT / script), *arguments]


def environment(**extra: str) -> dict[str, str]:
    """This process's environment without what a launcher or CI may have left in it."""
    drop = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "HYDRA_FULL_ERROR", "LATHE_FULL_ERROR")
    kept = {key: value for key, value in os.environ.items() if key not in drop and not key.startswith(LAUNCHERS)}
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "", **extra}


def run(
    *arguments: str, cwd: Path, script: str = "train.py", timeout: float = 240, **extra: str
) -> subprocess.CompletedProcess[str]:
    """Runs the real command in `cwd` and returns what it printed."""
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
    """Starts a command line with its output piped: forked, or by Python anew where the environment says what Python or
    a package does when it is imported. For `merged`, `session` and `fork_ranks` see `Command`."""
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
    """Runs a script's main in this process as if the arguments had been typed here; returns its exit code."""
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
    """Asserts that the command succeeded, showing its output if not."""
    assert done.returncode == 0, f"{done.args}\n{done.stdout}\n{done.stderr}"
    return done


def forget(package: str) -> None:
    """Takes a package that a test has written out of this process, for the next test that writes one of the name."""
    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        del sys.modules[name]
