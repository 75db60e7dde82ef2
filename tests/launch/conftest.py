"""Fixtures for tests of the launch."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hydra.core.hydra_config import HydraConfig
from support.typed import Command

from lathe.launch.error_reporting import FULL_ERROR
from lathe.runs.rundir import RunDir


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Command]:
    for key in [key for key in os.environ if key.startswith(("TORCHELASTIC", "SLURM")) or key in ("RANK", FULL_ERROR)]:
        monkeypatch.delenv(key)
    before = HydraConfig.instance().cfg
    yield Command(tmp_path / "logs")
    HydraConfig.instance().cfg = before


@pytest.fixture
def broken(command: Command, capsys: pytest.CaptureFixture[str]) -> RunDir:
    """An unfinished run of a small net."""
    command.fails("model=mlp", "seed=7", "trainer.max_epochs=3", job="support.agent_jobs:breaks_off", capsys=capsys)
    return command.runs[0]
