"""CPU threads of each process, `launch.threads`, and the CPUs they run on, `launch.numa`."""

import os
import shutil
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lathe.config.cpu_count import allowed_cpus, physical_cores
from lathe.errors import UserError

SAMPLE_S = 0.2  # for measuring how busy the cores are
NUMA_NODES = Path("/sys/devices/system/node")
QUIET = 0.5  # a load average that changes no number of threads, so that nothing is measured


def choose_threads(wanted: int | str | None, processes: int, recorded: Any = None) -> tuple[int | None, str]:
    """Choose the threads of each of this machine's `processes` (None: torch's choice), and give the reason.

    `auto` takes the number in the `recorded` config.yaml of a resumed run, since another number adds in another order;
    else OMP_NUM_THREADS; else the physical cores, or as many of them as other programs leave.
    """
    if isinstance(wanted, int):
        cpus = len(allowed_cpus())
        if wanted * processes > cpus:
            message = f"launch.threads={wanted}: {processes} x {wanted} threads share {cpus} CPUs. Use auto."
            warnings.warn(message, stacklevel=3)
        return wanted, ""
    if wanted is None:
        return None, ""
    if isinstance(recorded, int):
        return recorded, "as when the run was started"
    variable = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]
    if variable.isdigit():
        return int(variable), "from OMP_NUM_THREADS"
    cores, others = physical_cores(), _load_of_others()
    fair = min(cores, round(len(allowed_cpus()) ** 2 / (len(allowed_cpus()) + others)))
    reason = f"{cores} physical core{'s' * (cores > 1)}" + (f" over {processes} processes" if processes > 1 else "")
    if fair < cores:
        reason += f", shared with a load of {others:.1f} from other programs"
    return max(1, fair // processes), reason


def _load_of_others() -> float:
    """The CPUs that other programs use, at most the load average, so that a short burst does not count.

    When all CPUs are busy, only the load average shows how many processes wait for them.
    """
    import psutil  # not needed for a command that is refused

    load: float = psutil.getloadavg()[0]
    if load < QUIET:
        return load
    percents = psutil.cpu_percent(SAMPLE_S, percpu=True)
    used = sum(percent for number, percent in enumerate(percents) if number in allowed_cpus()) / 100
    return load if used > 0.9 * len(allowed_cpus()) else min(load, used)


@contextmanager
def use_threads(cfg: dict[str, Any]) -> Iterator[None]:
    """Let torch compute with `launch.threads` threads, or with its own choice where that is null."""
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


def numa_mode(cfg: dict[str, Any], mode: str) -> str | None:
    """The mode for torch, which binds local rank r to the CPUs of GPU r; None if there is nothing to bind.

    `auto` is `node` where torch can do it, and prints its choice on a machine with several NUMA nodes.

    Raises:
        UserError: a mode that torch can't use here.
    """
    has_one_node = len(list(NUMA_NODES.glob("node[0-9]*"))) <= 1  # none where the system does not list them
    if mode == "none" or (mode == "auto" and has_one_node):
        return None
    if has_one_node and mode != "exclusive" and sys.platform.startswith("linux"):
        warnings.warn(f"launch.numa={mode} does nothing here: this machine has one NUMA node.", stacklevel=2)
        return None
    missing = _numa_lacks(cfg)
    if mode == "auto":
        print(f"launch.numa=auto: {f'none, as it requires {missing}' if missing else 'node'}.", flush=True)
        return None if missing else "node"
    if missing:
        raise UserError(f"launch.numa={mode} requires {missing}. Use launch.numa=none.")
    return mode


def _numa_lacks(cfg: dict[str, Any]) -> str | None:
    """Return what the binding lacks, or None."""
    if not sys.platform.startswith("linux"):
        return "Linux"
    import torch

    trainer = cfg["trainer"]
    if trainer["accelerator"] not in ("auto", "gpu", "cuda") or not torch.cuda.device_count():
        return "GPUs"
    devices = trainer["devices"]
    if isinstance(devices, list) and devices != list(range(len(devices))):
        return f"the first GPUs, not trainer.devices={devices} (CUDA_VISIBLE_DEVICES can choose them)"
    return None if shutil.which("numactl") else "the program numactl"
