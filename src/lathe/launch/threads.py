"""CPU threads of each process: `launch.threads`."""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lathe.config.cores import allowed, physical_cores

SAMPLE_S = 0.2  # how long the use of the cores is measured before a run starts
QUIET = 0.5  # a load average that changes no number of threads: nothing is measured then


def choose_threads(wanted: int | str | None, processes: int, recorded: Any = None) -> tuple[int | None, str]:
    """Return the threads of each of this machine's `processes` (None: torch's own choice), and the reason in words.

    `auto` takes what the run was started with, as `recorded` in its config.yaml, since another number adds in another
    order; else OMP_NUM_THREADS; else the physical cores, or as many of them as other processes leave.
    """
    if isinstance(wanted, int):
        if wanted * processes > len(allowed()):
            warnings.warn(
                f"launch.threads={wanted}: {processes} x {wanted} threads share {len(allowed())} CPUs. Use auto.",
                stacklevel=3,
            )
        return wanted, ""
    if wanted is None:
        return None, ""
    if isinstance(recorded, int):
        return recorded, "as when the run was started"
    given = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]
    if given.isdigit():
        return int(given), "from OMP_NUM_THREADS"
    cores, others = physical_cores(), _load_of_others()
    fair = min(cores, round(len(allowed()) ** 2 / (len(allowed()) + others)))
    per_process = "" if processes == 1 else f" over {processes} processes"
    reason = f"{cores} physical core{'s' * (cores > 1)}{per_process}"
    if fair < cores:
        reason += f", shared with a load of {others:.1f} from other programs"
    return max(1, fair // processes), reason


def _load_of_others() -> float:
    """Return how many CPUs' worth of work other processes have: what they use now of the CPUs that this process may run
    on, but no more than the load average, so that a short burst does not count. CPUs that are all in use hide how many
    processes wait for them; the load average is the number then.
    """
    import psutil  # not needed for a command that is refused

    load: float = psutil.getloadavg()[0]
    if load < QUIET:
        return load
    percents = psutil.cpu_percent(SAMPLE_S, percpu=True)
    used = sum(percent for number, percent in enumerate(percents) if number in allowed()) / 100
    return load if used > 0.9 * len(allowed()) else min(load, used)


@contextmanager
def use_threads(cfg: dict[str, Any]) -> Iterator[None]:
    """Let torch compute with `launch.threads` threads, a number here, or with its own choice where it is null."""
    count = cfg.get("request", cfg).get("launch", {}).get("threads")
    if not isinstance(count, int):
        yield
        return
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)  # lathe.train in a notebook
