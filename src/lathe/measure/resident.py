"""Peak memory of a process."""

import sys
from pathlib import Path

import psutil


def peak_resident() -> int:
    """Return the peak resident set in bytes; Linux's getrusage would include the forking process."""
    status = Path("/proc/self/status")
    if status.is_file():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    import resource  # not on Windows

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def reset_peak(own: Path = Path("/proc/self")) -> bool:
    """Start a new peak; return False if the system does not support it (Linux does)."""
    try:
        (own / "clear_refs").write_text("5")
    except OSError:
        return False
    return True
