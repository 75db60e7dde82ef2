"""torch binds workers to CPUs; a binding that this machine lacks is refused before the start."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from lathe.launch import numa


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Set the machine's hardware: machine(nodes=2, gpus=4)."""

    def has(nodes: int = 2, gpus: int = 0, numactl: bool = True) -> None:
        for index in range(nodes):
            (tmp_path / f"node{index}").mkdir(exist_ok=True)
        (tmp_path / "possible").touch()
        monkeypatch.setattr(numa, "NUMA_NODES", tmp_path)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}" if numactl else None)
        monkeypatch.setattr("sys.platform", "linux")

    return has


def cfg(accelerator: str = "auto", devices: Any = 2) -> dict[str, Any]:
    return {"trainer": {"accelerator": accelerator, "devices": devices}}


@pytest.mark.parametrize(
    ("has", "mode", "said"),
    [
        ({"nodes": 1, "gpus": 4}, None, ""),
        ({"gpus": 4}, "node", "launch.numa=auto: node.\n"),
        ({"gpus": 0}, None, "launch.numa=auto: none, as it requires GPUs"),
        ({"gpus": 4, "numactl": False}, None, "launch.numa=auto: none, as it requires the program numactl"),
    ],
)
def test_auto_binds_where_it_can(
    machine: Any, has: dict[str, Any], mode: str | None, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    machine(**has)
    assert numa.numa_mode(cfg(), "auto") == mode
    printed = capsys.readouterr().out
    assert printed.startswith(said)
    assert bool(printed) == bool(said)
