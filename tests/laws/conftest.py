"""What several laws need: a command in this process."""

import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers import ROOT

Cli = Callable[..., tuple[int, str]]


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Cli:
    """Runs a script's main in this process as if its arguments had been typed in an empty folder: (exit code, standard error)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
    monkeypatch.setenv("LATHE_FULL_ERROR", "0")

    def call(*arguments: str, script: str = "train.py") -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", [str(ROOT / script), *arguments])
        capfd.readouterr()
        try:
            runpy.run_path(str(ROOT / script), run_name="__main__")
            code = 0
        except SystemExit as stop:
            code = int(stop.code or 0)
        return code, capfd.readouterr().err

    return call
