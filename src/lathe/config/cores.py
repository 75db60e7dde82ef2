"""How many cores of this machine a process may compute with, which what is `auto` goes by. Imports no torch."""

import os
from pathlib import Path

CPUS = Path("/sys/devices/system/cpu")
QUOTA = Path("/sys/fs/cgroup/cpu.max")  # microseconds of CPU time in a period of microseconds


def physical_cores() -> int:
    """How many cores this process may use, of which some systems show two or more threads as CPUs, and no more than a
    container's share of CPU time. CPUs count as cores where the system does not say."""
    cores = {_siblings(cpu) for cpu in allowed()}
    try:
        quota, period = QUOTA.read_text().split()
        share = max(1, int(quota) // int(period))
    except (OSError, ValueError):  # none, or "max"
        share = len(cores)
    return min(len(cores), share)


def allowed() -> set[int]:
    """The CPUs that this process may run on, by number."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def _siblings(cpu: int) -> str:
    """The CPUs of the core that this one belongs to."""
    try:
        return (CPUS / f"cpu{cpu}" / "topology" / "thread_siblings_list").read_text().strip()
    except OSError:
        return str(cpu)
