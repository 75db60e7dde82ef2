"""NVIDIA GPUs by NVML: load, memory, temperature, power and energy. The only place that knows its library."""

from dataclasses import dataclass
from typing import Any

import torch


class NoNvml(Exception):
    """There is no NVML for a GPU; the message says why."""


@dataclass(frozen=True)
class Reading:
    """What a GPU says at a moment, None where it does not (a MIG instance has no power of its own): `percent` of its
    last sampling period in which a kernel ran, `memory` in bytes that all processes hold, `celsius`, `watts`."""

    percent: float | None
    memory: float | None
    celsius: float | None
    watts: float | None


class Gpu:
    """One GPU behind NVML's library."""

    def __init__(self, library: Any, handle: Any) -> None:
        self._library, self._handle = library, handle

    def read(self) -> Reading:
        """Its state now; about a tenth of a millisecond."""
        load, memory = self._ask("nvmlDeviceGetUtilizationRates"), self._ask("nvmlDeviceGetMemoryInfo")
        milliwatts = self._ask("nvmlDeviceGetPowerUsage")
        return Reading(
            percent=None if load is None else float(load.gpu),
            memory=None if memory is None else float(memory.used),
            celsius=self.celsius(),
            watts=None if milliwatts is None else milliwatts / 1e3,
        )

    def celsius(self) -> float | None:
        """Temperature of the chip."""
        found = self._ask("nvmlDeviceGetTemperature", self._library.NVML_TEMPERATURE_GPU)
        return None if found is None else float(found)

    def watts(self) -> float | None:
        """Power drawn by the whole board."""
        milliwatts = self._ask("nvmlDeviceGetPowerUsage")
        return None if milliwatts is None else milliwatts / 1e3

    def joules(self) -> float | None:
        """Energy since the driver was loaded, by the board's own counter (Volta and later)."""
        millijoules = self._ask("nvmlDeviceGetTotalEnergyConsumption")
        return None if millijoules is None else millijoules / 1e3

    def _ask(self, name: str, *args: Any) -> Any:
        try:
            return getattr(self._library, name)(self._handle, *args)
        except self._library.NVMLError:  # not supported by this GPU, or not allowed
            return None


def open_gpu(index: int) -> Gpu:
    """The GPU that torch calls cuda:`index`, found by its UUID: NVML counts those too that CUDA_VISIBLE_DEVICES hides.

    Raises:
        NoNvml: the package is not installed, the driver has no NVML, or it does not know the GPU.
    """
    try:
        import pynvml
    except ImportError as error:
        raise NoNvml("pynvml can't be imported: pip install -e '.[gpu]'.") from error
    library: Any = pynvml
    try:
        library.nvmlInit()
        return Gpu(library, library.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(index).uuid}"))
    except library.NVMLError as error:
        raise NoNvml(f"NVML does not answer for cuda:{index} ({error}).") from error
