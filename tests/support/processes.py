"""Processes forked from a server that has imported heavy packages and cached compositions.

`Command` is `subprocess.Popen` for a script of the project: a process with a separate id, signals, working directory,
environment, output and exit code. It can't show the start itself, such as the time of imports or a start without torch;
tests of those start a new Python.
"""

import atexit
import functools
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from multiprocessing import forkserver, process, reduction
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import IO, Any

TESTS = Path(__file__).resolve().parents[1]
# Modules of nearly every command; `ahead` is last, as it freezes all objects.
PRELOADED = [
    "pytest",
    "lathe.training.train",
    "lathe.training.trainer_setup",
    "lathe.callbacks",
    "lathe.compression",
    "lathe.data",
    "lathe.launch",
    "lathe.nets",
    "lathe.optim",
    "lathe.strategies",
    "lathe.strategies.fsdp",
    "lathe.strategies.pipeline",
    "lathe.strategies.tensor",
    "lathe.tasks",
    "torchmetrics",
    "optuna.storages._rdb.models",  # and its modules for a database
    "alembic.command",
    "sqlalchemy.dialects.sqlite",
    "rich._emoji_codes",
    "support.ahead",
]


def server(*more: str) -> ForkServerContext:
    """Return the context of the server's processes. If this call starts it, it imports the modules `more`, too."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["support.unwatched", *more, *PRELOADED])
    _begin()
    return context


@functools.cache
def _begin() -> None:
    """Start the server with the path of `ahead`."""
    path = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(TESTS), *([path] if path else [])])
    try:
        forkserver.ensure_running()
    finally:
        if path is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = path


class Handed:
    """A file descriptor to pass to the new process."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (reduction.DupFd(self.descriptor),)


def _received(handed: Any) -> int:
    return int(handed.detach())


class Command:
    """A script of the project with its arguments, started at once. Its output is piped as text."""

    def __init__(
        self,
        line: list[str],
        cwd: str | Path,
        env: Mapping[str, str],
        merged: bool = False,
        session: bool = False,
        fork_ranks: bool = False,
    ) -> None:
        """Start `line`, as for `subprocess.Popen`: Python, a script, its arguments.

        `merged` writes both outputs to `stdout`. With `session` it leads a session, and so a process group. With
        `fork_ranks` its ranks are forked from it, for tests of results; tests of the processes need new ones.
        """
        self.args = line
        out, out_end = os.pipe()
        err, err_end = os.pipe()
        ends = (Handed(out_end), Handed(out_end if merged else err_end))
        self._process = server().Process(target=_main, args=(line[1:], str(cwd), dict(env), *ends, session, fork_ranks))
        self._process.start()
        os.close(out_end)
        os.close(err_end)
        self.stdout: IO[str] = os.fdopen(out, "r", errors="replace")
        self.stderr: IO[str] = os.fdopen(err, "r", errors="replace")
        assert self._process.pid is not None
        self.pid = self._process.pid

    def __enter__(self) -> "Command":
        return self

    def __exit__(self, *_: object) -> None:
        self.stdout.close()
        self.stderr.close()
        self.wait()

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        """Return the exit code, the negative number of the signal that ended it, or None while it runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return self._process.exitcode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Return its complete output, once it has ended."""
        found: dict[str, str] = {}
        readers = [
            threading.Thread(target=lambda name=name: found.update({name: getattr(self, name).read()}), daemon=True)
            for name in ("stdout", "stderr")
        ]
        deadline = None if timeout is None else time.monotonic() + timeout
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
            if reader.is_alive():
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        self.wait(None if deadline is None else max(1.0, deadline - time.monotonic()))
        self.stdout.close()
        self.stderr.close()
        return found["stdout"], found["stderr"]

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


def _main(words: list[str], cwd: str, env: dict[str, str], out: int, err: int, session: bool, fork_ranks: bool) -> None:
    """Run a script as a new Python would, but with modules imported."""
    if session:
        os.setsid()
    os.dup2(out, 1)
    os.dup2(err, 2)
    os.close(out)
    os.close(err)
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", closefd=False, errors="backslashreplace")  # noqa: SIM115
    signal.signal(signal.SIGINT, signal.default_int_handler)  # as in a terminal, however the tests were started
    multiprocessing.set_start_method(None, force=True)
    tempfile.tempdir = None
    os.chdir(cwd)
    process.ORIGINAL_DIR = cwd  # type: ignore[attr-defined]  # for processes that it spawns
    os.environ.clear()
    os.environ.update(env)
    script = Path(words[0]).resolve()
    paths = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = [str(script.parent), *paths, *(path for path in sys.path if path and Path(path).resolve() != TESTS)]
    sys.argv[:] = [str(script), *words[1:]]
    if fork_ranks:
        _fork_ranks()
    try:
        runpy.run_path(str(script), run_name="__main__")
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()


def _fork_ranks() -> None:
    """Fork the ranks of this command from it, so that they need no imports either."""
    from torch.distributed.launcher import api

    from lathe.launch import elastic

    made, begun = api.LaunchConfig, elastic.worker

    def worker(*of: Any) -> Any:
        from lightning.pytorch.utilities.rank_zero import rank_zero_only

        for name in elastic.SIGNALS.split(","):  # a new process has none of the agent's handlers
            signal.signal(getattr(signal, name), signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        rank_zero_only.rank = int(os.environ["RANK"])  # as set when it is imported
        return begun(*of)

    api.LaunchConfig = lambda **of: made(**{**of, "start_method": "fork"})  # type: ignore[assignment,misc]
    elastic.worker = worker
