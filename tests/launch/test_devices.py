"""Processes and missing devices; launch.threads: idle physical cores divided by the processes; launch.numa."""

import shutil
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from support.typed import Command

from lathe.config import cpu_count as cores_of_machine
from lathe.errors import UserError
from lathe.launch import devices
from lathe.launch.devices import choose_threads, count_processes, numa_mode
from lathe.launch.external_launch import ExternalLaunch


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Set the machine's devices: machine(cores=4, gpus=0, mps=False)."""

    def has(cores: int = 4, gpus: int = 0, mps: bool = False) -> None:
        monkeypatch.setattr("os.cpu_count", lambda: cores)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)

    has()
    return has


def cfg(accelerator: str = "auto", devices: Any = 1, nodes: int = 1, processes: str = "per_device") -> dict[str, Any]:
    return {
        "trainer": {"accelerator": accelerator, "devices": devices, "num_nodes": nodes},
        "strategy": {"processes": processes},
    }


@pytest.mark.parametrize(
    ("accelerator", "devices", "gpus", "mps", "count"),
    [
        ("cpu", 3, 0, False, 3),
        ("cpu", "auto", 8, False, 1),
        ("auto", "auto", 4, False, 4),
        ("gpu", [1, 3], 4, False, 2),
        ("auto", "auto", 0, True, 1),
    ],
)
def test_counts(machine: Any, accelerator: str, devices: Any, gpus: int, mps: bool, count: int) -> None:
    machine(gpus=gpus, mps=mps)
    assert count_processes(cfg(accelerator, devices)) == count


@pytest.mark.parametrize(
    ("accelerator", "devices", "gpus", "parts"),
    [
        ("gpu", 1, 0, ["trainer.accelerator=gpu", "no GPU"]),
        ("gpu", 3, 2, ["trainer.devices=3", "2 are here"]),
        ("gpu", [0, 2], 2, ["trainer.devices=[0, 2]", "from 0 to 1"]),
        ("cpu", [0], 0, ["trainer.devices=[0]", "on the CPU"]),
        ("cpu", 17, 0, ["trainer.devices=17", "at most 16"]),
    ],
)
def test_missing_devices_are_refused(machine: Any, accelerator: str, devices: Any, gpus: int, parts: list[str]) -> None:
    machine(gpus=gpus)
    with pytest.raises(UserError) as caught:
        count_processes(cfg(accelerator, devices))
    assert [part for part in parts if part not in str(caught.value)] == []


def test_a_strategy_of_one_process_drives_all_devices(machine: Any) -> None:
    machine(gpus=4)
    assert count_processes(cfg("gpu", 4, processes="one")) == 1
    with pytest.raises(UserError, match="asks for 5 GPUs"):
        count_processes(cfg("gpu", 5, processes="one"))


def test_an_outer_launcher_has_to_agree() -> None:
    assert count_processes(cfg("cpu", 2, nodes=3), ExternalLaunch("torchrun:1", 0, 0, 6, False)) == 2
    with pytest.raises(UserError, match=r"^trainer\.devices x trainer\.num_nodes = 1, but the launcher started 2 "):
        count_processes(cfg("cpu", 1), ExternalLaunch("torchrun:1", 0, 0, 2, False))


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Set the machine's hardware and load: cores(cpus=8, threads_per_core=2, used=1.5, load=2.0)."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)

    def has(cpus: int, threads_per_core: int = 2, quota: str | None = None, used: float = 0, load: float = 0) -> None:
        physical = cpus // threads_per_core
        for cpu in range(cpus):
            folder = tmp_path / f"cpu{cpu}" / "topology"
            folder.mkdir(parents=True)
            siblings = sorted(other for other in range(cpus) if other % physical == cpu % physical)
            (folder / "thread_siblings_list").write_text(",".join(map(str, siblings)) + "\n")
        if quota is not None:
            (tmp_path / "cpu.max").write_text(quota)
        monkeypatch.setattr(cores_of_machine, "CPUS", tmp_path)
        monkeypatch.setattr(cores_of_machine, "QUOTA", tmp_path / "cpu.max")
        for module in (cores_of_machine, devices):
            monkeypatch.setattr(module, "allowed_cpus", lambda: set(range(cpus)))
        percents = [100 * min(1.0, max(0.0, used - cpu)) for cpu in range(cpus)]
        monkeypatch.setattr(psutil, "cpu_percent", lambda *_, **__: percents)
        monkeypatch.setattr(psutil, "getloadavg", lambda: (load, load, load))

    return has


@pytest.mark.parametrize(
    ("cpus", "per_core", "quota", "processes", "count"),
    [
        (8, 2, None, 1, 4),
        (8, 1, None, 1, 8),
        (8, 2, None, 16, 1),
        (8, 2, "200000 100000", 1, 2),
        (8, 2, "50000 100000", 1, 1),
    ],
)
def test_auto_is_the_physical_cores_over_the_processes(
    cores: Any, cpus: int, per_core: int, quota: str | None, processes: int, count: int
) -> None:
    cores(cpus, per_core, quota)
    assert choose_threads("auto", processes)[0] == count


@pytest.mark.parametrize(
    ("cpus", "used", "load", "count"),
    [
        (2, 2.0, 6.0, 1),
        (2, 2.0, 0.3, 2),  # a burst
        (2, 0.0, 4.0, 2),  # a program that has just exited
        (8, 8.0, 56.0, 1),
    ],
)
def test_auto_takes_a_fair_share_of_busy_cores(cores: Any, cpus: int, used: float, load: float, count: int) -> None:
    cores(cpus, 1, used=used, load=load)
    threads, reason = choose_threads("auto", 1)
    assert threads == count
    assert ("other programs" in reason) == (count < cpus)


def test_a_recorded_number_and_then_the_environment_come_before_auto(
    cores: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    cores(8)
    monkeypatch.setenv("OMP_NUM_THREADS", "3,2")
    assert choose_threads("auto", 1)[0] == 3
    assert choose_threads("auto", 1, recorded=5)[0] == 5
    assert choose_threads("auto", 1, recorded="auto")[0] == 3
    assert choose_threads(2, 1, recorded=5)[0] == 2
    assert choose_threads(None, 1, recorded=5)[0] is None


def test_a_resumed_run_keeps_its_number_of_threads(
    command: Command, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    command.fails("model=mlp", job="support.agent_jobs:breaks_off", capsys=capsys)
    (run,) = command.runs
    assert run.config["launch"]["threads"] == 2
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    command(f"resume={run.path}")
    assert "CPU threads per process: 2 (as when the run was started)" in capsys.readouterr().out
    assert run.config["launch"]["threads"] == 2


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Set the machine's hardware: nodes(nodes=2, gpus=4)."""

    def has(nodes: int = 2, gpus: int = 0, numactl: bool = True) -> None:
        for index in range(nodes):
            (tmp_path / f"node{index}").mkdir(exist_ok=True)
        (tmp_path / "possible").touch()
        monkeypatch.setattr(devices, "NUMA_NODES", tmp_path)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}" if numactl else None)
        monkeypatch.setattr("sys.platform", "linux")

    return has


@pytest.mark.parametrize(
    ("has", "mode", "printed"),
    [
        ({"nodes": 1, "gpus": 4}, None, ""),
        ({"gpus": 4}, "node", "launch.numa=auto: node.\n"),
        ({"gpus": 4, "numactl": False}, None, "launch.numa=auto: none, as it requires the program numactl.\n"),
    ],
)
def test_auto_binds_where_it_can(
    nodes: Any, has: dict[str, Any], mode: str | None, printed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    nodes(**has)
    assert numa_mode({"trainer": {"accelerator": "auto", "devices": 2}}, "auto") == mode
    assert capsys.readouterr().out == printed
