"""What a figure was measured on: the processor and what it can do, the GPU, and the versions of what computed."""

import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

# What decides how fast small number formats are; names as Linux spells them, x86 first, then ARM.
INSTRUCTION_SETS = (
    "avx2",
    "fma",
    "f16c",
    "avx512f",
    "avx512_vnni",
    "avx_vnni",
    "avx512_bf16",
    "avx512_fp16",
    "amx_tile",
    "amx_int8",
    "amx_bf16",
    "asimd",
    "asimddp",
    "i8mm",
    "bf16",
    "sve",
    "sve2",
)
PACKAGES = (
    "torch",
    "lightning",
    "torchao",
    "torch-pruning",
    "onnx",
    "onnxscript",
    "onnxruntime",
    "executorch",
    "tensorrt",
    "torch-tensorrt",
    "torch-model-archiver",
    "safetensors",
    "numpy",
)


def describe_cpu(cpuinfo: Path = Path("/proc/cpuinfo")) -> dict[str, Any]:
    """The processor's `name`, how many `cores` this process may use, its `instruction_sets` of those that matter here,
    and the highest level that torch's own kernels use (`torch`). Where there is no such file the first two come from
    Python and the sets are empty."""
    fields: dict[str, str] = {}
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
    """The GPU's `name`, its `compute_capability` and `memory` in bytes, and the versions of CUDA and cuDNN; None for a
    CPU.
    """
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
    """How many cores the process may run on, which a container or a scheduler may have limited."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def versions() -> dict[str, str]:
    """Of Python and of those packages that are installed and compute."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found
