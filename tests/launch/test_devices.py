"""The number of processes of a run, and missing devices."""

from typing import Any

import pytest
import torch

from lathe.errors import UserError
from lathe.launch.devices import count_processes
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
        ("cpu", 1, 0, False, 1),
        ("cpu", 3, 0, False, 3),
        ("cpu", "auto", 8, False, 1),
        ("auto", 2, 0, False, 2),
        ("auto", "auto", 4, False, 4),
        ("gpu", "auto", 4, False, 4),
        ("gpu", [1, 3], 4, False, 2),
        ("mps", "auto", 0, True, 1),
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


def outer(world: int) -> ExternalLaunch:
    return ExternalLaunch("torchrun:1", 0, 0, world, False)


def test_an_outer_launcher_has_to_agree() -> None:
    assert count_processes(cfg("cpu", 2, nodes=3), outer(6)) == 2
    with pytest.raises(
        UserError, match=r"^trainer\.devices x trainer\.num_nodes = 1, but the launcher started 2 processes"
    ):
        count_processes(cfg("cpu", 1), outer(2))
