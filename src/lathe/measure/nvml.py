"""Load, memory, temperature, power and energy of NVIDIA GPUs. Only this module uses NVML's library."""

from typing import Any

import torch


class NoNvml(Exception):
    """NVML is not available for a GPU; the message has the reason."""


class Gpu:
    """One GPU, read through NVML; what it does not report is None."""

    def __init__(self, library: Any, handle: Any) -> None:
        self._library, self._handle = library, handle

    def read(self) -> dict[str, float | None]:
        """Return percent of time with a running kernel, bytes in use, degrees and watts, in about 0.1 ms."""
        load, memory = self._ask("nvmlDeviceGetUtilizationRates"), self._ask("nvmlDeviceGetMemoryInfo")
        milliwatts = self._ask("nvmlDeviceGetPowerUsage")
        return {
            "gpu_percent": None if load is None else float(load.gpu),
            "gpu_memory_bytes": None if memory is None else float(memory.used),
            "gpu_celsius": self.celsius(),
            "gpu_watts": None if milliwatts is None else milliwatts / 1e3,
        }

    def celsius(self) -> float | None:
        """Return the temperature of the chip."""
        found = self._ask("nvmlDeviceGetTemperature", self._library.NVML_TEMPERATURE_GPU)
        return None if found is None else float(found)

    def joules(self) -> float | None:
        """Return the energy since the driver was loaded, by the board's counter (Volta and later)."""
        millijoules = self._ask("nvmlDeviceGetTotalEnergyConsumption")
        return None if millijoules is None else millijoules / 1e3

    def _ask(self, name: str, *args: Any) -> Any:
        try:
            return getattr(self._library, name)(self._handle, *args)
        except self._library.NVMLError:  # not supported by this GPU, or not allowed
            return None


def open_gpu(index: int) -> Gpu:
    """Return the GPU cuda:`index`, found by its UUID, because NVML ignores CUDA_VISIBLE_DEVICES.

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
