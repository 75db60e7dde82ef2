"""Readings of a GPU by NVML, with a stand-in for its library."""

from typing import Any

import pytest
from support.nvml import FakeNvml, install

from lathe.measure.nvml import NoNvml, open_gpu

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
