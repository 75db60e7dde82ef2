"""Workers of pytest-xdist that come from the server of `processes.py`, which has imported the heavy packages once for
all of them, and which they share for the commands that they start.
"""

import atexit
import multiprocessing
import os
import sys
import threading
from multiprocessing import forkserver, process
from pathlib import Path
from typing import Any

import pytest
from _pytest.assertion import rewrite
from execnet import gateway_io
from execnet.gateway_base import Popen2IO

from support.processes import Handed, server

_create_anew = gateway_io.create_io
# What tests import when they are collected and later, beside what a command needs.
COLLECTED = ["support.shared"]


class _Forked(Popen2IO):
    """What execnet has of a worker: its pipes, and its end."""

    def __init__(self, execmodel: Any) -> None:
        words_out, words_in = os.pipe()
        answers_out, answers_in = os.pipe()
        self._process = server(*COLLECTED).Process(target=_serve, args=(Handed(words_out), Handed(answers_in)))
        self._process.start()
        os.close(words_out)
        os.close(answers_in)
        process._children.discard(self._process)  # type: ignore[attr-defined]  # it ends with its pipes, unwaited for
        super().__init__(os.fdopen(words_in, "wb"), os.fdopen(answers_out, "rb"), execmodel)

    def wait(self) -> int | None:
        self._process.join()
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()


def _serve(words: int, answers: int) -> None:
    """What a fresh Python does that execnet started, in a process that is new but for what it has imported."""
    os.dup2(words, 0)
    os.dup2(answers, 1)
    os.close(words)
    os.close(answers)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    multiprocessing.set_start_method(None, force=True)
    process.ORIGINAL_DIR = os.getcwd()  # type: ignore[attr-defined]
    # The server that it came from answers its requests too; Python would start one more, by either name.
    forkserver._forkserver.ensure_running = forkserver.ensure_running = lambda: None  # type: ignore[method-assign]
    let_plugins_be_imported()
    try:
        exec(gateway_io.popen_bootstrapline, {"__name__": "__main__"})
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()


def let_plugins_be_imported() -> None:
    """hydra and hypothesis bring plugins, which pytest would have liked to import itself."""
    rewrite.AssertionRewritingHook._warn_already_imported = lambda *_: None  # type: ignore[method-assign]


def _create(spec: Any, execmodel: Any) -> Any:
    """A worker of this machine that is told nothing else of its Python."""
    return _Forked(execmodel) if spec.popen and not spec.python else _create_anew(spec, execmodel)


def fork() -> None:
    """From now on in this process, which hands out tests."""
    gateway_io.create_io = _create


def rewrite_ahead(config: pytest.Config, tests: Path) -> None:
    """Keeps what pytest makes of each file of tests beside it, which on a fresh checkout each worker would do for
    itself; the server imports meanwhile.
    """
    server(*COLLECTED)
    for file in tests.rglob("test_*.py"):
        folder = rewrite.get_cache_dir(file)
        kept = folder / (file.stem + rewrite.PYC_TAIL)
        if rewrite.try_makedirs(folder) and rewrite._read_pyc(file, kept) is None:
            stamp, code = rewrite._rewrite_test(file, config)
            rewrite._write_pyc(config.stash[rewrite.assertstate_key], code, stamp, kept)
