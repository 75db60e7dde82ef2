"""Readings of GPUs and joules, from a stand-in for NVML's library and counters that the test advances."""

from pathlib import Path
from typing import Any

import pytest
from support.nvml import FakeNvml, install

from lathe.measure.hardware import Gpu, Meter, NoNvml, Rapl, open_gpu


def gpu_of(**values: Any) -> tuple[Gpu, dict[str, Any]]:
    return Gpu(FakeNvml(), values), values


def package(root: Path, folder: str, name: str, joules: float) -> Path:
    path = root / folder
    path.mkdir()
    (path / "name").write_text(f"{name}\n")
    (path / "max_energy_range_uj").write_text("1000000000\n")
    (path / "energy_uj").write_text(f"{int(joules * 1e6)}\n")
    return path / "energy_uj"


def test_gpus_are_added_and_one_without_a_counter_is_left_out() -> None:
    boards = [gpu_of(millijoules=1000, milliwatts=100000), gpu_of(millijoules=2000), gpu_of(milliwatts=3)]
    meter = Meter([gpu for gpu, _ in boards], None)
    for _, board in boards[:2]:
        board["millijoules"] += 500
    assert meter.joules() == {"gpu": 1.0}
    boards[0][1]["millijoules"] = None  # a failed reading loses nothing
    assert meter.joules() == {"gpu": 1.0}
    silent = Meter([boards[2][0]], None)
    assert not silent.sees
    assert silent.joules() == {}


def test_packages_of_a_machine_are_added_and_their_counters_start_again(tmp_path: Path) -> None:
    first = package(tmp_path, "intel-rapl:0", "package-0", 999.0)
    second = package(tmp_path, "intel-rapl:1", "package-1", 10.0)
    core, whole = (
        package(tmp_path, "intel-rapl:0:0", "core", 1.0),  # is part of the package
        package(tmp_path, "intel-rapl:2", "psys", 1.0),  # contains the packages
    )
    meter = Meter([], Rapl(tmp_path))
    for path in (core, whole):
        path.write_text("900000000")
    second.write_text("12500000")
    assert meter.joules() == {"cpu": 2.5}
    first.write_text("4000000")  # wrapped around at 1000 J
    assert meter.joules() == {"cpu": pytest.approx(7.5)}


BOARD: dict[str, Any] = {"percent": 87, "memory": 2**31, "celsius": 64, "milliwatts": 251500, "millijoules": 4000}


def test_a_gpu_is_found_by_its_uuid_and_read_in_plain_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA_VISIBLE_DEVICES may hide some, so that torch's first is not NVML's."""
    install(monkeypatch, FakeNvml(hidden={"percent": 1}, seen=BOARD), "seen")
    gpu = open_gpu(0)
    assert list(gpu.read().values()) == [87.0, 2.0**31, 64.0, 251.5]
    assert (gpu.celsius(), gpu.joules()) == (64.0, 4.0)


def test_readings_that_a_gpu_lacks_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, FakeNvml(mig={"memory": 5}), "mig")
    gpu = open_gpu(0)
    assert list(gpu.read().values()) == [None, 5.0, None, None]
    assert gpu.joules() is None


def test_a_gpu_that_it_does_not_know_and_a_driver_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    library = FakeNvml(a=BOARD)
    install(monkeypatch, library, "a", "b")
    with pytest.raises(NoNvml, match=r"^NVML does not answer for cuda:1 \(Not Found\)\.$"):
        open_gpu(1)
    library.driver = False
    with pytest.raises(NoNvml, match=r"^NVML does not answer for cuda:0 \(NVML Shared Library Not Found\)\.$"):
        open_gpu(0)
