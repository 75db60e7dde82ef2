"""Runs ExecuTorch programs in this process, with its threads and filters for its messages."""

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
)  # printed by ExecuTorch's runtime on every processor that is not a phone's


class Pool:
    """XNNPACK's thread pool, which all programs of a process share.

    A program keeps a reference to the pool that it was loaded with, and would use it after it is freed: so all are
    unloaded before the pool changes, and reloaded at their next call.
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
    """The method `forward` of a file. The content is kept for reloading, because the file may be replaced."""

    def __init__(self, path: Path, threads: int | None) -> None:
        self.content, self.threads = path.read_bytes(), threads
        self.program: Any = None
        self.method: Any = None
        POOL.programs.add(self)

    def ready(self) -> Any:
        """Return the loaded method, on the requested number of threads."""
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
    """Hide messages of ExecuTorch's imports and passes about the packages that they use."""
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
    """Buffer the process's stderr, then print it without the lines of `NATIVE_NOTES`."""
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
