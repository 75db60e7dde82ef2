"""Joules of GPUs and processors, of counters that a test turns."""

import time
from pathlib import Path
from typing import Any

import pytest
from support.nvml import FakeNvml

from lathe.measure import energy
from lathe.measure.energy import Meter, Rapl
from lathe.measure.nvml import Gpu


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def gpu_of(**values: Any) -> tuple[Gpu, dict[str, Any]]:
    return Gpu(FakeNvml(), values), values


def package(root: Path, folder: str, name: str, joules: float) -> Path:
    path = root / folder
    path.mkdir()
    (path / "name").write_text(f"{name}\n")
    (path / "max_energy_range_uj").write_text("1000000000\n")
    (path / "energy_uj").write_text(f"{int(joules * 1e6)}\n")
    return path / "energy_uj"


def test_a_counter_says_it_by_itself() -> None:
    gpu, board = gpu_of(millijoules=5000, milliwatts=100000)
    clock = Clock()
    meter = Meter([gpu], None, clock)
    board["millijoules"], clock.now = 12000, 200.0
    assert meter.joules() == {"gpu": 7.0}


def test_without_one_power_is_added_up_over_time() -> None:
    gpu, board = gpu_of(milliwatts=100000)
    clock = Clock()
    meter = Meter([gpu], None, clock)
    board["milliwatts"], clock.now = 300000, 102.0
    assert meter.joules() == {"gpu": 400.0}  # from 100 W to 300 W in 2 s
    clock.now = 103.0
    assert meter.joules() == {"gpu": 700.0}
    board["milliwatts"], clock.now = None, 104.0
    assert meter.joules() == {"gpu": 700.0}
    board["milliwatts"], clock.now = 300000, 105.0  # a look that failed loses nothing
    assert meter.joules() == {"gpu": 1300.0}


def test_gpus_are_added_and_one_that_says_nothing_is_left_out() -> None:
    boards = [gpu_of(millijoules=1000), gpu_of(millijoules=2000), gpu_of(percent=3)]
    meter = Meter([gpu for gpu, _ in boards], None)
    for _, board in boards[:2]:
        board["millijoules"] += 500
    assert meter.joules() == {"gpu": 1.0}
    silent = Meter([boards[2][0]], None)
    assert not silent.sees
    assert silent.joules() == {}


def test_packages_of_a_machine_are_added_and_their_counters_start_again(tmp_path: Path) -> None:
    first = package(tmp_path, "intel-rapl:0", "package-0", 999.0)
    second = package(tmp_path, "intel-rapl:1", "package-1", 10.0)
    core, whole = (
        package(tmp_path, "intel-rapl:0:0", "core", 1.0),  # is in the package
        package(tmp_path, "intel-rapl:2", "psys", 1.0),  # has the packages in it
    )
    meter = Meter([], Rapl(tmp_path))
    for path in (core, whole):
        path.write_text("900000000")
    second.write_text("12500000")
    assert meter.joules() == {"cpu": 2.5}
    first.write_text("4000000")  # past 1000 J
    assert meter.joules() == {"cpu": pytest.approx(7.5)}


def test_counters_that_may_not_be_read_are_none(tmp_path: Path) -> None:
    package(tmp_path, "intel-rapl:0", "package-0", 1.0).unlink()
    assert not Rapl(tmp_path).readable
    assert not Rapl(tmp_path / "nothing").readable
    assert not Meter([], Rapl(tmp_path)).sees


def test_it_looks_by_itself_until_it_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(energy, "PERIOD", 0.001)
    gpu, board = gpu_of(milliwatts=1000)
    clock = Clock()
    meter = Meter([gpu], None, clock)
    meter.start()
    clock.now = 101.0
    deadline = time.monotonic() + 30
    while meter._boards[0].at != 101.0 and time.monotonic() < deadline:
        time.sleep(0.001)
    board["milliwatts"], clock.now = 3000, 102.0
    meter.stop()
    assert meter.joules() == {"gpu": pytest.approx(3.0, abs=1.0)}  # 1 J, and then 2 J or 3 J by when it looked
    known = meter.joules()
    clock.now = 1000.0
    assert meter.joules() == known
    assert meter._thread is None
