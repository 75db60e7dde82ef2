"""Runs that the export tests share, and fast substitutes for its subprocesses and tracers."""

import copy
import importlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.commands import start
from support.exports import made
from support.runs import ROOT, SMALL
from torch import Tensor, nn

from lathe.export.targets.onnx import Onnx
from lathe.runs.rundir import RunDir
from lathe.verbs import export as parity


@pytest.fixture(scope="session")
def mlp(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """A small net on digits."""
    return made(tmp_path_factory.mktemp("logs"), *SMALL)


@pytest.fixture
def run(mlp: RunDir, tmp_path: Path) -> RunDir:
    """A copy of a run, whose exports belong to this test."""
    shutil.copytree(mlp.path, tmp_path / "run", ignore=shutil.ignore_patterns("exports"))
    return RunDir(tmp_path / "run")


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run files in this process."""

    def run(words: list[str]) -> None:
        importlib.import_module(words[2]).main(Path(words[3]))

    monkeypatch.setattr(parity, "_run", run)


@pytest.fixture
def reloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Open weights-only files in processes that already imported torch and Lightning; others in a fresh Python."""
    anew = parity._run

    def run(words: list[str]) -> None:
        if not json.loads((Path(words[3]) / "job.json").read_text())["folder"].endswith("weights"):
            anew(words)
        else:
            process = start([words[0], str(ROOT / "src/lathe/verbs/export_probe.py"), *words[3:]], ROOT)
            out, errors = process.communicate(timeout=60)
            assert process.returncode == 0, out + errors

    monkeypatch.setattr(parity, "_run", run)


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch, here: None) -> None:
    """The file of target=onnx is a number, the key of its stored net."""
    kept: list[nn.Module] = []

    def write(self: Onnx, net: nn.Module, example: Tensor, path: Path) -> None:
        path.write_bytes(b"%08d" % len(kept) * 4)
        kept.append(copy.deepcopy(net))

    def load(self: Onnx, path: Path, threads: int | None = None, device: str | None = None) -> Any:
        net = kept[int(path.read_bytes()[:8])]

        def forward(x: Any) -> Any:
            with torch.no_grad():
                return np.asarray(net(torch.from_numpy(x)))

        return forward

    monkeypatch.setattr(Onnx, "export", write)
    monkeypatch.setattr(Onnx, "load", load)
