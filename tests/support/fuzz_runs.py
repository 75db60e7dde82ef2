"""A warm process that runs command lines up to the first training step and says what became of each."""

import json
import os
import runpy
import shutil
import signal
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import lathe.launch.elastic
import lathe.launch.launcher
import lathe.launch.run_commands
import lathe.training.train
from lathe.benchmark import crew, inference
from lathe.config.values import is_valid
from support.fuzz_draws import Draw
from support.runs import ROOT


class Reached(BaseException):
    """Everything before the first training step was accepted, or before the job of another verb."""


class Slow(BaseException):
    """A command line took longer than any may."""


@dataclass
class Outcome:
    """What became of a command line; `cfg` is the resolved configuration where it was accepted."""

    accepted: bool
    code: int
    errors: str
    seconds: float
    cfg: dict[str, Any] | None
    left: list[str]


class Warm:
    """Runs scripts in this process, in a folder of their own, up to the first training step."""

    def __init__(self, folder: Path, run: Path, patch: pytest.MonkeyPatch, capture: pytest.CaptureFixture[str]) -> None:
        self.folder, self.run, self.patch, self.capture = folder, run, patch, capture
        self.cfg: dict[str, Any] | None = None
        self.real = lathe.launch.elastic.run_job
        self.known: dict[tuple[str, tuple[str, ...]], dict[str, Any] | None] = {}
        patch.setenv("HYDRA_FULL_ERROR", "0")
        patch.setenv("LATHE_FULL_ERROR", "0")
        for module in (lathe.launch.launcher, lathe.launch.run_commands):
            patch.setattr(module, "run_job", self._execute)
        patch.setattr(lathe.training.run_start.RunStart, "on_train_start", self._reach)
        patch.setattr(crew, "run", self._reach)
        patch.setattr(inference, "compare", self._reach)

    def _execute(self, job: str, cfg: dict[str, Any], processes: int, *options: Any) -> Any:
        self.cfg = cfg
        if (
            job != "lathe.training.train:train" or processes > 1 or options[0]["max_restarts"]
        ):  # workers of their own know nothing of this class
            raise Reached
        return self.real(job, cfg, processes, *options)

    @staticmethod
    def _reach(*_: Any) -> None:
        raise Reached

    def __call__(self, script: str, *arguments: str) -> Outcome:
        folder = self.folder / "here"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        self.patch.chdir(folder)
        words = [word.replace("RUN", str(self.run)) if word == "run=RUN" else word for word in arguments]
        self.patch.setattr(sys, "argv", [str(ROOT / script), *words])
        self.capture.readouterr()
        self.cfg, code, accepted, began = None, 0, False, time.process_time()
        with warnings.catch_warnings(), _limited(120), _left_alone():
            warnings.simplefilter("ignore")
            try:
                runpy.run_path(str(ROOT / script), run_name="__main__")
                accepted = True
            except Reached:
                accepted = True
            except Slow:
                code = -1
            except SystemExit as stop:
                code = int(stop.code or 0)
                accepted = code == 0
        left = sorted(
            str(path.relative_to(folder)) for name in ("config.yaml", "latest") for path in folder.rglob(name)
        )
        return Outcome(accepted, code, self.capture.readouterr().err, time.process_time() - began, self.cfg, left)

    def baseline(self, script: str, base: tuple[str, ...]) -> dict[str, Any] | None:
        """The resolved configuration of a command line without anything wrong."""
        if (script, base) not in self.known:
            self.known[script, base] = self(script, *base).cfg
        return self.known[script, base]


@contextmanager
def _left_alone() -> Iterator[None]:
    """Brings back what a command sets in its process for good: environment, signals, process group and torch's
    switches.
    """
    environment, dtype = dict(os.environ), torch.get_default_dtype()
    deterministic, warns = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    benchmark, threads = torch.backends.cudnn.benchmark, torch.get_num_threads()
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    handlers = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        deepspeed = sys.modules.get("deepspeed.comm.comm")  # keeps a group of its own
        if torch.distributed.is_initialized():
            (
                deepspeed if deepspeed is not None and deepspeed.cdb is not None else torch.distributed
            ).destroy_process_group()
        if "mlflow.store.tracking.sqlalchemy_store" in sys.modules:
            _forget_databases()
        os.environ.clear()
        os.environ.update(environment)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        torch.set_default_dtype(dtype)
        torch.use_deterministic_algorithms(deterministic, warn_only=warns)
        torch.backends.cudnn.benchmark = benchmark
        torch.set_num_threads(threads)


def _forget_databases() -> None:
    """MLflow keeps what it opened by its address, under which the next command finds another file."""
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore
    from mlflow.tracking._tracking_service.registry import TrackingStoreRegistry

    TrackingStoreRegistry._get_store_with_resolved_uri.cache_clear()
    while SqlAlchemyStore._engine_map:
        SqlAlchemyStore._engine_map.popitem()[1].dispose()


@contextmanager
def _limited(seconds: int) -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise Slow

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def fault(draw: Draw, warm: Warm) -> str | None:
    """What is wrong with the answer to a command line, or None."""
    found = warm(draw.script, *draw.base, *draw.words)
    lines = [line for line in found.errors.splitlines() if line.strip()]
    if found.code == -1:
        return "took longer than 120 seconds"
    if found.left:
        return f"left {found.left}"
    if found.accepted:
        return _fault_of_what_was_taken(draw, found, warm)
    if len(lines) > len(
        draw.words
    ):  # a choice that can't work here, such as 3d on one process, says so beside the mistake
        own = warm(draw.script, *draw.base).errors.splitlines()
        lines = [line for line in lines if line not in own]
    if (
        found.code != 1
        or not 1 <= len(lines) <= len(draw.words)
        or not all(line.startswith("Error: ") for line in lines)
    ):
        return f"exit code {found.code}, {len(lines)} lines: {' / '.join(lines)[-1500:]}"
    if found.seconds > 10:
        return f"took {found.seconds:.1f} seconds"
    return None


def _fault_of_what_was_taken(draw: Draw, found: Outcome, warm: Warm) -> str | None:
    if draw.added:
        return "accepted a key that nothing reads"
    if found.cfg is None:
        return None  # a script that goes no way through the launch; its own tests say what it does
    value = _value(found.cfg, draw.key)
    if draw.schema is not None and not draw.words[0].startswith("~") and not is_valid(value, draw.schema):
        return f"accepted {value!r}, which the schema does not take"
    base, taken = _plain(warm.baseline(draw.script, draw.base)), _plain(found.cfg)
    same = taken == base
    default = all(_value(base, word.partition("=")[0]) == _value(taken, word.partition("=")[0]) for word in draw.words)
    typed = any(word.startswith(("+", "~")) for word in draw.words)
    return f"accepted, and changed nothing: {value!r}" if same and (typed or not default) else None


def _value(cfg: Any, key: str) -> Any:
    value = (cfg or {}).get("request", cfg)
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _plain(cfg: dict[str, Any] | None) -> Any:
    """A configuration without what differs between any two runs."""
    cfg = json.loads(json.dumps(cfg, default=str, sort_keys=True))
    if isinstance(cfg, dict):
        cfg.get("paths", {}).pop("run_dir", None)
    return cfg
