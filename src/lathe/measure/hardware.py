"""The hardware of a measurement: its description, readings of GPUs by NVML, and the energy that it uses."""

import os
import platform
import threading
from collections.abc import Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

# Those that decide the speed of small number formats, by Linux's names: x86 first, then ARM.
INSTRUCTION_SETS = (
    *("avx2", "fma", "f16c", "avx512f", "avx512_vnni", "avx_vnni", "avx512_bf16", "avx512_fp16"),
    *("amx_tile", "amx_int8", "amx_bf16", "asimd", "asimddp", "i8mm", "bf16", "sve", "sve2"),
)
PACKAGES = (
    *("torch", "lightning", "torchao", "torch-pruning", "onnx", "onnxscript", "onnxruntime", "executorch"),
    *("tensorrt", "torch-tensorrt", "torch-model-archiver", "safetensors", "numpy"),
)
POWERCAP = Path("/sys/class/powercap")
PERIOD = 1.0  # seconds between two readings of energy


def describe_cpu() -> dict[str, Any]:
    """Describe the processor.

    `cores` is the number that this process may use, `instruction_sets` the processor's part of `INSTRUCTION_SETS`, and
    `torch` the highest level that torch's kernels use. Without /proc/cpuinfo the sets are empty.
    """
    cpuinfo = Path("/proc/cpuinfo")
    lines = [line.partition(":") for line in cpuinfo.read_text().splitlines()] if cpuinfo.is_file() else []
    fields = {key.strip().lower(): value.strip() for key, _, value in lines}
    flags = set((fields.get("flags") or fields.get("features") or "").split())
    return {
        "name": fields.get("model name") or fields.get("cpu model") or platform.processor() or platform.machine(),
        "cores": usable_cores(),
        "instruction_sets": [name for name in INSTRUCTION_SETS if name in flags],
        "torch": torch.backends.cpu.get_cpu_capability(),
    }


def describe_gpu(device: torch.device) -> dict[str, Any] | None:
    """Describe the GPU (`memory` in bytes) and the versions of CUDA and cuDNN; None for a CPU."""
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    return {
        "name": properties.name,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "memory": properties.total_memory,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
    }


def usable_cores() -> int:
    """Return the number of cores that the process may run on, which a container or scheduler may limit."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def versions() -> dict[str, str]:
    """Return the versions of Python and of the installed packages among `PACKAGES`."""
    numbers = {"python": platform.python_version()}
    for package in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            numbers[package] = metadata.version(package)
    return numbers


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
        degrees = self._ask("nvmlDeviceGetTemperature", self._library.NVML_TEMPERATURE_GPU)
        return None if degrees is None else float(degrees)

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
    """Return the GPU cuda:`index`, found by its UUID as NVML ignores CUDA_VISIBLE_DEVICES; raise NoNvml without."""
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


class Rapl:
    """Energy counters (RAPL) of a machine's processor packages, without memory; by default root only."""

    def __init__(self, root: Path = POWERCAP) -> None:
        self._micro, self._last = 0, dict[Path, int]()  # a package's counter at the last reading, in microjoules
        for path in sorted(root.glob("intel-rapl:*")):
            with suppress(OSError, ValueError):  # not allowed
                if (path / "name").read_text().startswith("package"):
                    self._last[path] = int((path / "energy_uj").read_text())

    @property
    def readable(self) -> bool:
        return bool(self._last)

    def joules(self) -> float:
        """Return the joules so far; exact if called more often than the counter wraps, after minutes."""
        for path, last in self._last.items():
            with suppress(OSError, ValueError):
                now = int((path / "energy_uj").read_text())
                around = int((path / "max_energy_range_uj").read_text()) if now < last else 0
                self._micro += now - last + around
                self._last[path] = now
        return self._micro / 1e6


class Meter:
    """Counts joules of `gpus`, and of `rapl` in one process of a machine, in a thread from `start` to `stop`."""

    def __init__(self, gpus: Sequence[Gpu], rapl: Rapl | None) -> None:
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._first = {gpu: joules for gpu in gpus if (joules := gpu.joules()) is not None}
        self._totals = dict.fromkeys(self._first, 0.0)
        self._rapl = rapl if rapl is not None and rapl.readable else None
        self._cpu = 0.0
        self._thread: threading.Thread | None = None

    @property
    def sees(self) -> bool:
        """Return whether there is anything to count."""
        return bool(self._first) or self._rapl is not None

    def start(self) -> None:
        if self.sees and self._thread is None:
            self._thread = threading.Thread(target=self._run, name="lathe-energy", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while not self._ended.wait(PERIOD):
            self.joules()

    def stop(self) -> None:
        """Read a last time and end the thread; the counts are kept."""
        self.joules()
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def joules(self) -> dict[str, float]:
        """Return the joules so far, for those of `gpu` and `cpu` that can be counted."""
        with self._lock:
            if not self._ended.is_set():
                for gpu, first in self._first.items():
                    if (now := gpu.joules()) is not None:
                        self._totals[gpu] = now - first
                self._cpu = self._rapl.joules() if self._rapl is not None else 0.0
            gpu_joules = {"gpu": sum(self._totals.values())} if self._first else {}
            return gpu_joules | ({"cpu": self._cpu} if self._rapl is not None else {})
