"""Programs of ExecuTorch in this process: their threads, and what its runtime and its passes say that nobody asked
for.
"""

import logging
import os
import sys
import tempfile
import threading
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lathe.export.bounded import Array

NATIVE_NOTES = (
    b"[cpuinfo_utils.cpp",
    b"[threadpool.cpp",
)  # what ExecuTorch's runtime says of every processor that is no phone's


class Pool:
    """XNNPACK's threads, of which a process has one pool, for all programs.

    A program holds on to the pool that it was loaded with, and would use it after it is gone: so all are taken out
    before the pool changes, and each is loaded again at its next call.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.programs: weakref.WeakSet[Program] = weakref.WeakSet()

    def resize(self, threads: int) -> None:
        from executorch.extension.pybindings import portable_lib  # type: ignore[import-untyped,import-not-found,unused-ignore]

        if portable_lib._threadpool_get_thread_count() != threads:
            for program in self.programs:
                program.method = program.program = None
            with without_native_notes():
                portable_lib._unsafe_reset_threadpool(threads)


POOL = Pool()


class Program:
    """A file's method `forward`. The file's content is kept, since it may have to be loaded again after the file was
    replaced.
    """

    def __init__(self, path: Path, threads: int | None) -> None:
        self.content, self.threads = path.read_bytes(), threads
        self.program: Any = None
        self.method: Any = None
        POOL.programs.add(self)

    def ready(self) -> Any:
        """The loaded method, on as many threads as wanted."""
        if self.threads is not None:
            POOL.resize(self.threads)
        if self.method is None:
            from executorch.runtime import Runtime  # type: ignore[import-untyped,import-not-found,unused-ignore]

            self.program = Runtime.get().load_program(self.content)
            self.method = self.program.load_method("forward")
        return self.method

    def __call__(self, x: Array) -> Array:
        with POOL.lock:
            (out,) = self.ready().execute((torch.from_numpy(np.require(x, requirements=["C", "W"])),))
        found: Array = out.numpy()
        return found


@contextmanager
def quiet() -> Iterator[None]:
    """Without what ExecuTorch's imports and passes say of the packages that they use."""
    loggers = [logging.getLogger(name) for name in ("torchao", "torch.utils._pytree")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(
            logging.ERROR
        )  # libraries of other processors that can't be loaded, enumerations registered twice
    try:
        with warnings.catch_warnings():
            for message in (
                ".*treespec, LeafSpec.*",
                r"`torch\.jit\.\w+` is deprecated",
                r"(read|open)_(text|binary) is deprecated",
                "This API is experimental",
            ):
                warnings.filterwarnings("ignore", message=message)
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@contextmanager
def without_native_notes() -> Iterator[None]:
    """Holds back what is written to the process's stderr, and gives it out afterwards without the lines of
    `NATIVE_NOTES`.
    """
    sys.stderr.flush()
    with tempfile.TemporaryFile() as held:
        own = os.dup(2)
        os.dup2(held.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(own, 2)
            os.close(own)
            held.seek(0)
            for line in held:
                if not line.startswith(NATIVE_NOTES):
                    os.write(2, line)
