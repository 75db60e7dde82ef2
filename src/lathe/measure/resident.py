"""What a process has taken of the machine's memory."""

import sys
from pathlib import Path

import psutil


def peak_resident(status: Path = Path("/proc/self/status")) -> int:
    """Bytes of memory that this process had at its fullest since it began, the libraries that it has loaded included
    (its peak resident set). Not by getrusage where Linux says it better: that counts what forked it as well.
    """
    if status.is_file():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    import resource  # not on Windows

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def reset_peak(own: Path = Path("/proc/self")) -> bool:
    """The peak is sought anew from here on; False where the system has no such switch (Linux has)."""
    try:
        (own / "clear_refs").write_text("5")
    except OSError:
        return False
    return True
