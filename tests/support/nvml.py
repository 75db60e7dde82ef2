"""A fake of the NVML library."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch


class FakeNvml(ModuleType):
    """The subset of pynvml that Lathe uses. `gpus` are the boards by UUID; None is an unsupported value."""

    NVML_TEMPERATURE_GPU = 0

    class NVMLError(Exception):
        pass

    def __init__(self, **gpus: dict[str, Any]) -> None:
        super().__init__("pynvml")
        self.gpus = {f"GPU-{uuid}": values for uuid, values in gpus.items()}
        self.driver = True

    def nvmlInit(self) -> None:
        if not self.driver:
            raise self.NVMLError("NVML Shared Library Not Found")

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> dict[str, Any]:
        if uuid not in self.gpus:
            raise self.NVMLError("Not Found")
        return self.gpus[uuid]

    def _told(self, handle: dict[str, Any], name: str) -> Any:
        if handle.get(name) is None:
            raise self.NVMLError("Not Supported")
        return handle[name]

    def nvmlDeviceGetUtilizationRates(self, handle: Any) -> Any:
        return SimpleNamespace(gpu=self._told(handle, "percent"))

    def nvmlDeviceGetMemoryInfo(self, handle: Any) -> Any:
        return SimpleNamespace(used=self._told(handle, "memory"))

    def nvmlDeviceGetTemperature(self, handle: Any, sensor: int) -> Any:
        assert sensor == self.NVML_TEMPERATURE_GPU
        return self._told(handle, "celsius")

    def nvmlDeviceGetPowerUsage(self, handle: Any) -> Any:
        return self._told(handle, "milliwatts")

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: Any) -> Any:
        return self._told(handle, "millijoules")


def install(monkeypatch: pytest.MonkeyPatch, library: FakeNvml, *uuids: str) -> None:
    """Make `import pynvml` return the library, and torch report GPUs with these `uuids`, in this order."""
    monkeypatch.setitem(sys.modules, "pynvml", library)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=uuids[index]))
