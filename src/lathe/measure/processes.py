"""The training processes: collectives over them (without a process group there is one), and the peak memory of each."""

import re
import sys
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor


def processes() -> int:
    """Return the number of processes."""
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_world_size() if distributed else 1


def everyones(value: Any) -> list[Any]:
    """Return each process's value, in the order of ranks. A collective, which pickles values."""
    each = [value] * processes()
    if len(each) > 1:
        torch.distributed.all_gather_object(each, value)
    return each


def everyones_tensors(tensor: Tensor) -> list[Tensor]:
    """Return each process's tensor; shapes and dtypes must be equal on all."""
    each = [tensor] * processes()
    if len(each) > 1:
        each = [torch.empty_like(tensor) for _ in each]
        torch.distributed.all_gather(each, tensor)
    return each


def peak_resident() -> int:
    """Return the peak resident set in bytes; Linux's getrusage would include the forking process."""
    status = Path("/proc/self/status")
    if status.is_file() and (kilobytes := re.search(r"VmHWM:\s+(\d+)", status.read_text())):
        return int(kilobytes[1]) * 1024
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    import resource  # not on Windows

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def reset_peak() -> bool:
    """Start a new peak; return False if the system does not support it (Linux does)."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True
