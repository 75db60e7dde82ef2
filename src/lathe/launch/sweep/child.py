"""A job's process, forked from the sweep's after the imports.

The sweep's process has only imported what a run needs, so jobs can't affect each other, and the imports are paid once.
"""

import atexit
import ctypes
import json
import multiprocessing.process
import multiprocessing.util
import os
import signal
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lathe.errors import UserError
from lathe.files import write_atomically
from lathe.launch.error_reporting import explain_error, report_error
from lathe.launch.stdio import prepare_stdio

SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGCHLD") if hasattr(signal, name)
)


def fork(work: Callable[[], Any], log: Path, outcome: Path, variables: Mapping[str, str], threads: int | None) -> int:
    """Run `work` in a forked process, and return its id. `log` gets its output, `outcome` its number or error."""
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    pid = os.fork()
    if pid:
        os.setpgid(pid, pid)  # both do, as either may come first
        return pid
    code = 1
    try:
        _alone(parent, log)
        os.environ.update(variables)
        if threads is not None:
            import torch

            torch.set_num_threads(threads)
        code = _told(work, outcome)
        _ended()
    except BaseException:  # no caller could handle it
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _alone(parent: int, log: Path) -> None:
    """Detach this process from its parent's group, signals and terminal. It dies with its parent."""
    os.setpgid(0, 0)
    atexit._clear()
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]  # such as the parent's temporary folders
    multiprocessing.process._children = set()  # type: ignore[attr-defined]
    for ending in (weakref.finalize._exitfunc, multiprocessing.util._exit_function):  # type: ignore[attr-defined]
        atexit.register(ending)
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # 1 is PR_SET_PDEATHSIG
        if os.getppid() != parent:
            os._exit(1)
    for number in SIGNALS:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))  # noqa: SIM115
    prepare_stdio()


def _told(work: Callable[[], Any], outcome: Path) -> int:
    """Run `work`, write its outcome, and return the exit code."""
    try:
        value = work()
    except SystemExit as error:  # stopped by a signal: no outcome
        return error.code if isinstance(error.code, int) else 1
    except Exception as error:
        report_error(error)
        explained = explain_error(error)
        mistake = isinstance(error, UserError)
        words = str(explained) if explained else f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        write_atomically(outcome, json.dumps({"sentence": words, "mistake": mistake}))
        return 1
    good = isinstance(value, (int, float)) and not isinstance(value, bool)
    write_atomically(outcome, json.dumps({"objective": float(value) if good else None}))
    return 0


def _ended() -> None:
    """Run what Python runs at exit."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
