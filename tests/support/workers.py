"""Workers of pytest-xdist, forked from the server of `processes.py`, which they use for commands too."""

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
# Modules that tests import, in addition to a command's.
COLLECTED = ["support.shared"]


class _Forked(Popen2IO):
    """execnet's view of a worker: its pipes and its end."""

    def __init__(self, execmodel: Any) -> None:
        words_out, words_in = os.pipe()
        answers_out, answers_in = os.pipe()
        self._process = server(*COLLECTED).Process(target=_serve, args=(Handed(words_out), Handed(answers_in)))
        self._process.start()
        os.close(words_out)
        os.close(answers_in)
        process._children.discard(self._process)  # type: ignore[attr-defined]  # it ends with its pipes, without a wait
        super().__init__(os.fdopen(words_in, "wb"), os.fdopen(answers_out, "rb"), execmodel)

    def wait(self) -> int | None:
        self._process.join()
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()


def _serve(words: int, answers: int) -> None:
    """Run what execnet starts in a new Python, but with modules imported."""
    os.dup2(words, 0)
    os.dup2(answers, 1)
    os.close(words)
    os.close(answers)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    multiprocessing.set_start_method(None, force=True)
    process.ORIGINAL_DIR = os.getcwd()  # type: ignore[attr-defined]
    # The server answers its requests too; Python would start another one, by either name.
    forkserver._forkserver.ensure_running = forkserver.ensure_running = lambda: None  # type: ignore[method-assign]
    let_plugins_be_imported()
    try:
        exec(gateway_io.popen_bootstrapline, {"__name__": "__main__"})
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()


def let_plugins_be_imported() -> None:
    """Silence pytest about the plugins of hydra and hypothesis, which are imported already."""
    rewrite.AssertionRewritingHook._warn_already_imported = lambda *_: None  # type: ignore[method-assign]


def _create(spec: Any, execmodel: Any) -> Any:
    """Fork a local worker that has no other Python configured."""
    return _Forked(execmodel) if spec.popen and not spec.python else _create_anew(spec, execmodel)


def fork() -> None:
    """Fork workers from now on in this process, which distributes tests."""
    gateway_io.create_io = _create


def rewrite_ahead(config: pytest.Config, tests: Path) -> None:
    """Write pytest's rewritten bytecode of each test file, once for all workers, while the server imports."""
    server(*COLLECTED)
    for file in tests.rglob("test_*.py"):
        folder = rewrite.get_cache_dir(file)
        kept = folder / (file.stem + rewrite.PYC_TAIL)
        if rewrite.try_makedirs(folder) and rewrite._read_pyc(file, kept) is None:
            stamp, code = rewrite._rewrite_test(file, config)
            rewrite._write_pyc(config.stash[rewrite.assertstate_key], code, stamp, kept)
