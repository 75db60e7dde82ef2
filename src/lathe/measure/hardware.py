"""The hardware and package versions of a measurement."""

import os
import platform
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


def describe_cpu() -> dict[str, Any]:
    """Describe the processor.

    `cores` is the number that this process may use, `instruction_sets` the processor's part of `INSTRUCTION_SETS`, and
    `torch` the highest level that torch's kernels use. Without /proc/cpuinfo the sets are empty.
    """
    fields, cpuinfo = dict[str, str](), Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text().splitlines():
            key, _, value = line.partition(":")
            fields.setdefault(key.strip().lower(), value.strip())
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
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found
