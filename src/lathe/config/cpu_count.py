"""CPU cores that this process may use. Imports no torch."""

import os
from pathlib import Path

CPUS = Path("/sys/devices/system/cpu")
QUOTA = Path("/sys/fs/cgroup/cpu.max")  # microseconds of CPU time in a period of microseconds
CPU_PROCESSES_PER_CORE = 4  # a larger number of ranks on one machine is a typing mistake


def physical_cores() -> int:
    """Count the cores that this process may use, up to the CPU quota of its container.

    Hyper-threads of one core count once, if the system says which they are.
    """
    cores = {_thread_siblings(cpu) for cpu in allowed_cpus()}
    try:
        quota, period = QUOTA.read_text().split()
        share = max(1, int(quota) // int(period))
    except (OSError, ValueError):  # no quota, or "max"
        share = len(cores)
    return min(len(cores), share)


def allowed_cpus() -> set[int]:
    """Return the numbers of the CPUs that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def _thread_siblings(cpu: int) -> str:
    try:
        return (CPUS / f"cpu{cpu}" / "topology" / "thread_siblings_list").read_text().strip()
    except OSError:
        return str(cpu)
