"""The acceptance tests on GPUs (tests/gpu, `python -m pytest -m gpu`): device, which can be a CPU, and record."""

import contextlib
import io
import json
import os
import platform
import subprocess
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback

import lathe
import lathe.training.train
from lathe.verbs.load import Run
from support.commands import check, in_process
from support.commands import run as run_command
from support.runs import column

NO_GPU = "no GPU is visible here (what can runs on a CPU with --gpu-stand-in=cpu)"
# A small run that logs every step; a body adds its net.
BASE = """
    data.source.train_size=64 data.source.val_size=16 data.source.test_size=16
    data.batch_size=16 optimizer=adamw trainer.max_epochs=null trainer.max_steps=4 trainer.check_val_every_n_epoch=null
    trainer.val_check_interval=4 trainer.enable_progress_bar=false trainer.enable_model_summary=false
    trainer.log_every_n_steps=1 compression.receipt=none
"""
PIXELS = ("data=synthetic", "data.image_size=8")
PLAIN = (*PIXELS, "model=deep_mlp", "model.net.width=16", "model.net.depth=2")
CONVOLUTIONS = (*PIXELS, "model=resnet20", "model.net.width=8", "model.net.depth=8", "optimizer.lr=1e-3")
TOKENS = ("model=gpt_nano", "data=synthetic_tokens", "model.net.depth=2", "model.net.width=32")


class Acceptance:
    """Trains on the tested device, and for reference on the CPU."""

    def __init__(self, folder: Path, stand_in: str | None) -> None:
        self.real = stand_in is None
        self.accelerator = "gpu" if self.real else "cpu"
        self.device = torch.device("cuda" if self.real else "cpu")
        self.count = torch.cuda.device_count() if self.real else 2  # processes over gloo
        self.folder = folder
        self._curves: dict[tuple[str, ...], list[float]] = {}

    def words(self, *words: str, accelerator: str | None = None) -> list[str]:
        device = f"trainer.accelerator={accelerator or self.accelerator}"
        return [*BASE.split(), device, f"paths.log_dir={self.folder}", *words]

    def train(self, *words: str, accelerator: str | None = None, watch: Callback | None = None) -> Run:
        """Train a run in this process; `watch` is an additional callback."""
        make = lathe.training.train.make_callbacks
        more = [] if watch is None else [watch]
        with pytest.MonkeyPatch.context() as patched, warnings.catch_warnings():
            patched.setattr(lathe.training.train, "make_callbacks", lambda cfg, task: [*make(cfg, task), *more])
            warnings.simplefilter("ignore")  # of strategies on one device, and of a machine's libraries
            with contextlib.redirect_stdout(io.StringIO()):
                found: Run = lathe.train(self.words(*words, accelerator=accelerator))
        return found

    def curve(self, *words: str, **options: Any) -> list[float]:
        """Return the loss of each training step."""
        return column(self.train(*words, **options).dir, "train/loss")

    def reference(self, *words: str) -> list[float]:
        """Return `curve` of one process on the CPU, trained once."""
        if words not in self._curves:
            self._curves[words] = self.curve(*words, accelerator="cpu")
        return self._curves[words]

    def command(self, *words: str, script: str = "train.py", timeout: float = 300) -> str:
        """Return the output of a real command, which must succeed."""
        return check(run_command(*words, script=script, cwd=self.folder, timeout=timeout)).stdout

    def launched(self, *words: str) -> tuple[Path, list[float]]:
        """Return the directory of a run by the real command, and its loss of each training step."""
        before = set(self.folder.glob("train/*"))
        self.command(*self.words(*words))
        (run,) = set(self.folder.glob("train/*")) - before
        return run, column(run, "train/loss")

    def script(self, script: str, *words: str) -> int:
        """Return the exit code of a script in this process."""
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings(), contextlib.chdir(self.folder):
            warnings.simplefilter("ignore")
            return in_process(f"scripts/{script}.py", *words)


def close(found: list[float], wanted: list[float], relative: float) -> None:
    """Assert that two curves are relatively close, and longer than one step."""
    assert len(found) == len(wanted) > 1
    assert found == pytest.approx(wanted, rel=relative)


class Record:
    """The results of an acceptance run on a GPU, for README and docs/gpu.md (scripts/gpu_column.py)."""

    def __init__(self, path: Path) -> None:
        self.path, self.tests = path, dict[str, dict[str, Any]]()
        self._began = time.monotonic()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if "tests/gpu/" not in report.nodeid:
            return
        kept = self.tests.setdefault(report.nodeid.rpartition("tests/gpu/")[2], {"outcome": "passed", "seconds": 0.0})
        kept["seconds"] = round(kept["seconds"] + report.duration, 2)
        if report.user_properties:
            kept["figures"] = dict(report.user_properties)
        if report.outcome != "passed":
            kept["outcome"] = report.outcome
            kept["sentence"] = _reason(report)

    def pytest_sessionfinish(self) -> None:
        if self.tests:
            self.path.write_text(json.dumps(self.facts(), indent=1) + "\n")

    def facts(self) -> dict[str, Any]:
        """The time, hardware and versions of the run, and every test with its outcome."""
        names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
        return {
            "day": time.strftime("%Y-%m-%d"),
            "gpus": names,
            "driver": driver(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "python": platform.python_version(),
            "commit": _first("git", "rev-parse", "HEAD"),
            "seconds": round(time.monotonic() - self._began),
            "tests": self.tests,
        }


def _reason(report: pytest.TestReport) -> str:
    """Return the reason of a skip or failure: a command's error, or else the assertion."""
    told = [line.removeprefix("Error: ") for line in report.capstderr.splitlines() if line.startswith("Error: ")]
    crash = getattr(report.longrepr, "reprcrash", None)
    if isinstance(report.longrepr, tuple):
        said = report.longrepr[2].removeprefix("Skipped: ")
    elif told:
        said = told[-1]
    else:
        said = crash.message.splitlines()[0] if crash else str(report.longrepr)
    return str(said.strip().splitlines()[-1][:300])


def driver() -> str | None:
    return _first("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")


def _first(*command: str) -> str | None:
    """Return the first line of a command's output; None if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, cwd=os.path.dirname(__file__))
    except OSError:
        return None
    return done.stdout.splitlines()[0].strip() if done.returncode == 0 and done.stdout.strip() else None
