"""Fixtures of all tests."""

import functools
import gc
import logging
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from _pytest.logging import catching_logs
from hydra.core.global_hydra import GlobalHydra
from torch._export import utils as export_utils
from torch.onnx._internal.exporter import _registration

from support import composing, quick, timm_here
from support.commands import in_process

torch.set_num_threads(1)
composing.once()
quick.quick()
# Each export to ONNX would list torch's operators again, for half a second; no test adds to the list.
_registration.ONNXRegistry.from_torchlib = staticmethod(functools.cache(_registration.ONNXRegistry.from_torchlib))
_settled_at = 0.0
_materialize_anew, _materialized = export_utils._materialize_cpp_cia_ops, []


def _materialize_once() -> None:
    """Materialize composite operators only if new ones were registered; each export asks more than thirty times."""
    found = torch._C._dispatch_get_registrations_for_dispatch_key("CompositeImplicitAutograd")
    if found != _materialized:
        _materialize_anew()
        _materialized[:] = found


export_utils._materialize_cpp_cia_ops = _materialize_once


@functools.cache
def _apart() -> list[logging.Logger]:
    """Return the loggers that don't propagate to the root at the start of a test."""
    return [
        logger
        for logger in logging.root.manager.loggerDict.values()
        if isinstance(logger, logging.Logger) and not logger.propagate
    ]


def _catch(self: Any) -> Any:
    """Replace pytest's method, which searches thousands of loggers six times a test."""
    if self.level is not None:
        self.handler.setLevel(self.level)
    self.attached_loggers += [logging.root, *_apart()]
    for logger in self.attached_loggers:
        logger.addHandler(self.handler)
    if self.level is not None:
        self.orig_level = logging.root.level
        logging.root.setLevel(min(self.orig_level, self.level))
    return self.handler


catching_logs.__enter__ = _catch  # type: ignore[method-assign]


@pytest.fixture(scope="module", autouse=True)
def _settled() -> None:
    """Freeze what a file of tests has imported, so that the many collections of measurements skip it."""
    global _settled_at
    if time.monotonic() - _settled_at > 2:
        gc.collect()
        gc.freeze()
        _settled_at = time.monotonic()


@pytest.fixture(autouse=True)
def _clean_state():
    """Start each test without a composed configuration, and restore torch's settings and log levels."""
    GlobalHydra.instance().clear()
    for name in ("LATHE_TRUSTED", "LATHE_CONFIG_DIR"):  # set by an earlier command in this process
        os.environ.pop(name, None)
    if (events := sys.modules.get("tensorboard.summary.writer.event_file_writer")) is not None:
        # It numbers a process's files, and for files of the same second ".10" is read before ".9".
        events._global_uid = events.AtomicCounter(0)
    logged, silenced = logging.root.level, logging.root.manager.disable
    matmul, convolutions = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    yield
    if (logging.root.level, logging.root.manager.disable) != (logged, silenced):  # each call visits all loggers
        logging.root.setLevel(logged)
        logging.disable(silenced)
    torch.set_float32_matmul_precision(matmul)
    torch.backends.cudnn.allow_tf32 = convolutions
    GlobalHydra.instance().clear()
    _apart.cache_clear()


@pytest.fixture
def cli(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str]]:
    """Run a script's main in this process in an empty folder: (exit code, standard error)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
    monkeypatch.setenv("LATHE_FULL_ERROR", "0")

    def call(*arguments: str, script: str = "train.py") -> tuple[int, str]:
        capfd.readouterr()
        return in_process(script, *arguments), capfd.readouterr().err

    return call


@pytest.fixture
def timm(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The package timm; skips if it is not installed."""
    return timm_here.use(monkeypatch)
