"""What all tests find."""

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
# Each export to ONNX would list torch's operators anew, for half a second; none here adds to the list.
_registration.ONNXRegistry.from_torchlib = staticmethod(functools.cache(_registration.ONNXRegistry.from_torchlib))
_settled_at = 0.0
_materialize_anew, _materialized = export_utils._materialize_cpp_cia_ops, []


def _materialize_once() -> None:
    """Each export lists torch's operators thirty times and more; only one that is new has to be made."""
    found = torch._C._dispatch_get_registrations_for_dispatch_key("CompositeImplicitAutograd")
    if found != _materialized:
        _materialize_anew()
        _materialized[:] = found


export_utils._materialize_cpp_cia_ops = _materialize_once


@functools.cache
def _apart() -> list[logging.Logger]:
    """The loggers that hand nothing on to the root, as they are when a test begins."""
    return [
        logger
        for logger in logging.root.manager.loggerDict.values()
        if isinstance(logger, logging.Logger) and not logger.propagate
    ]


def _catch(self: Any) -> Any:
    """As pytest does it, which looks through the thousands of loggers six times a test."""
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
    """What a file of tests finds, modules above all, is no garbage: a collection, of which a measurement makes several,
    need not walk through it again. Files that take a moment find what the one before them found."""
    global _settled_at
    if time.monotonic() - _settled_at > 2:
        gc.collect()
        gc.freeze()
        _settled_at = time.monotonic()


@pytest.fixture(autouse=True)
def _clean_state():
    """Each test starts without a composed configuration and leaves torch's global settings, and how much is logged, as
    they were.
    """
    GlobalHydra.instance().clear()
    for name in ("LATHE_TRUSTED", "LATHE_CONFIG_DIR"):  # what an earlier command in this process trusted and was given
        os.environ.pop(name, None)
    if (events := sys.modules.get("tensorboard.summary.writer.event_file_writer")) is not None:
        # It numbers the files of a process, and of files begun in the same second ".10" is read before ".9".
        events._global_uid = events.AtomicCounter(0)
    logged, silenced = logging.root.level, logging.root.manager.disable
    matmul, convolutions = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    yield
    if (logging.root.level, logging.root.manager.disable) != (logged, silenced):  # each call walks through all loggers
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
    """Runs a script's main in this process as if its arguments had been typed in an empty folder: (exit code, standard
    error).
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
    monkeypatch.setenv("LATHE_FULL_ERROR", "0")

    def call(*arguments: str, script: str = "train.py") -> tuple[int, str]:
        capfd.readouterr()
        return in_process(script, *arguments), capfd.readouterr().err

    return call


@pytest.fixture
def timm(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The package timm; skips where it is not installed."""
    return timm_here.use(monkeypatch)
