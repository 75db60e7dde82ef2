"""Machines, processes and CPU threads of a run: `launch.nodes` and its like, `trainer.devices`, `launch.threads`.

Imports torch only if there are GPUs to count.
"""

import os
import shutil
import socket
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lathe.config.cpu_count import CPU_PROCESSES_PER_CORE, allowed_cpus, physical_cores
from lathe.errors import require
from lathe.launch.external_launch import ExternalLaunch

SAMPLE_S = 0.2  # for measuring how busy the cores are
NUMA_NODES = Path("/sys/devices/system/node")
QUIET = 0.5  # a load average that changes no number of threads, so that nothing is measured


@dataclass(frozen=True)
class Nodes:
    """From `least` to `most` machines that meet at `endpoint` (host:port), in a launch named `launch_id`."""

    least: int = 1
    most: int = 1
    endpoint: str = "localhost:0"
    launch_id: str | None = None

    @property
    def several(self) -> bool:
        """True if more than one machine can take part."""
        return self.most > 1

    @property
    def address(self) -> str | None:
        """This machine's address on the network of the endpoint, where other machines reach its ranks."""
        if not self.several:
            return None
        host, _, port = self.endpoint.rpartition(":")
        try:
            addresses = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)
            family, kind, protocol, _, target = addresses[0]
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(target)  # sends nothing
                return str(probe.getsockname()[0])
        except OSError:
            return None


def read_nodes(options: dict[str, Any], external: ExternalLaunch | None = None) -> Nodes:
    """Read the machines from the configuration's `launch` group.

    Under srun with one task on each node, the SLURM job gives the endpoint and the name where they are null.
    """
    nodes, endpoint, launch_id = options["nodes"], options["endpoint"], options["id"]
    least, most = (int(number) for number in (str(nodes).split(":") * 2)[:2])
    require(1 <= least <= most, f"launch.nodes={nodes}: expected a number from 1, or min:max such as 2:4.")
    if most == 1:
        require(endpoint is None, f"launch.endpoint={endpoint} has no effect with launch.nodes=1. Leave it out.")
        message = f"launch.id={launch_id} has no effect under torchrun or srun, which name the run. Leave it out."
        require(launch_id is None or external is None, message)
        return Nodes(launch_id=None if launch_id is None else str(launch_id))
    if external is not None:
        tasks = external.world_size
        one_each = external.launch_id.startswith("slurm:") and os.environ.get("SLURM_NNODES", str(tasks)) == str(tasks)
        problem = f"launch.nodes={nodes} starts the ranks itself, but a launcher started {tasks} processes"
        require(one_each and least <= tasks <= most, f"{problem}. Use python, or srun with one task on each node.")
        endpoint = endpoint or f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        launch_id = launch_id or external.launch_id.replace(":", "-")
    require(launch_id is not None, f"launch.nodes={nodes} requires launch.id, a name that all nodes share.")
    require(endpoint is not None, f"launch.nodes={nodes} requires launch.endpoint=host:port of one of the nodes.")
    can_restart = least == most or options["max_restarts"] > 0
    require(can_restart, f"launch.nodes={nodes} continues without a lost node by a restart. Set launch.max_restarts.")
    return Nodes(least, most, str(endpoint), str(launch_id))


def count_processes(cfg: dict[str, Any], external: ExternalLaunch | None = None, nodes: Nodes | None = None) -> int:
    """Count the processes of this machine for `trainer.devices`; raise UserError if it lacks the devices."""
    nodes = nodes or Nodes()
    trainer, strategy = cfg["trainer"], cfg["strategy"]
    accelerator, devices = trainer["accelerator"], trainer["devices"]
    on_cpu = accelerator == "cpu" or (accelerator == "auto" and devices == 1)
    count = _count_cpu_processes(devices) if on_cpu else _count_gpus(accelerator, devices)
    if external is not None:
        world = count * int(trainer["num_nodes"])
        problem = f"trainer.devices x trainer.num_nodes = {world}, but the launcher started {external.world_size} "
        require(external.world_size == world, f"{problem}processes. Make them equal.")
    else:
        machines = int(trainer["num_nodes"])
        message = f"trainer.num_nodes={machines}: start a run on several machines with launch.nodes={machines}."
        require(machines in (1, nodes.most), message)
    one_process = strategy.get("processes") == "one"
    message = f"launch.nodes={nodes.most} needs a strategy with a process per device, such as strategy=ddp."
    require(not (one_process and nodes.several), message)
    return 1 if one_process else count


def _count_cpu_processes(devices: Any) -> int:
    if isinstance(devices, list):
        # the schema check reports a device that is named twice
        message = f"trainer.devices={devices} are GPU numbers, and this run is on the CPU. Give a number of processes."
        require(len(set(devices)) < len(devices), message)
        return len(devices)
    count, cores = 1 if devices in ("auto", -1) else int(devices), os.cpu_count() or 1
    most = max(8, CPU_PROCESSES_PER_CORE * cores)
    require(count <= most, f"trainer.devices={devices} is too much for {cores} cores. Use at most {most}.")
    return count


def _count_gpus(accelerator: str, devices: Any) -> int:
    import torch

    available, mps = torch.cuda.device_count(), torch.backends.mps.is_available()
    if accelerator == "mps" or (accelerator in ("auto", "gpu") and not available and mps):
        require(mps, "trainer.accelerator=mps is not available here. Use trainer.accelerator=auto.")
        available = 1
    elif accelerator == "auto" and not available:
        return _count_cpu_processes(devices)
    kind = "TPU" if accelerator == "tpu" else "GPU"
    message = f"trainer.accelerator={accelerator}: no {kind} is visible here. Use trainer.accelerator=auto."
    require(available > 0, message)
    if isinstance(devices, list):
        message = f"trainer.devices={devices} has a GPU that is not here. Give numbers from 0 to {available - 1}."
        require(all(index < available for index in devices), message)
        return len(devices)
    count = available if devices in ("auto", -1) else int(devices)
    require(count <= available, f"trainer.devices={devices} asks for {count} GPUs, but {available} are here.")
    return count


def choose_threads(wanted: int | str | None, processes: int, recorded: Any = None) -> tuple[int | None, str]:
    """Choose the threads of each of this machine's `processes` (None: torch's choice), and give the reason.

    `auto` takes the number in the `recorded` config.yaml of a resumed run, since another number adds in another order;
    else OMP_NUM_THREADS; else the physical cores, or as many of them as other programs leave.
    """
    if isinstance(wanted, int):
        count = len(allowed_cpus())
        if wanted * processes > count:
            message = f"launch.threads={wanted}: {processes} x {wanted} threads share {count} CPUs. Use auto."
            warnings.warn(message, stacklevel=2)
        return wanted, ""
    if wanted is None:
        return None, ""
    if isinstance(recorded, int):
        return recorded, "as when the run was started"
    variable = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]
    if variable.isdigit():
        return int(variable), "from OMP_NUM_THREADS"
    import psutil  # not needed for a command that is refused

    cpus, cores, others = allowed_cpus(), physical_cores(), psutil.getloadavg()[0]
    if others >= QUIET:
        # at most the load average, so that a short burst does not count; when all CPUs are busy, only the load average
        # shows how many processes wait for them
        percents = psutil.cpu_percent(SAMPLE_S, percpu=True)
        used = sum(percent for number, percent in enumerate(percents) if number in cpus) / 100
        others = others if used > 0.9 * len(cpus) else min(others, used)
    fair = min(cores, round(len(cpus) ** 2 / (len(cpus) + others)))
    reason = f"{cores} physical core{'s' * (cores > 1)}" + (f" over {processes} processes" if processes > 1 else "")
    if fair < cores:
        reason += f", shared with a load of {others:.1f} from other programs"
    return max(1, fair // processes), reason


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
    """
    has_one_node = len(list(NUMA_NODES.glob("node[0-9]*"))) <= 1  # none where the system does not list them
    if mode == "none" or (mode == "auto" and has_one_node):
        return None
    if has_one_node and mode != "exclusive" and sys.platform.startswith("linux"):
        warnings.warn(f"launch.numa={mode} does nothing here: this machine has one NUMA node.", stacklevel=2)
        return None
    import torch

    trainer, missing = cfg["trainer"], None
    devices = trainer["devices"]
    if not sys.platform.startswith("linux"):
        missing = "Linux"
    elif trainer["accelerator"] not in ("auto", "gpu", "cuda") or not torch.cuda.device_count():
        missing = "GPUs"
    elif isinstance(devices, list) and devices != list(range(len(devices))):
        missing = f"the first GPUs, not trainer.devices={devices} (CUDA_VISIBLE_DEVICES can choose them)"
    elif not shutil.which("numactl"):
        missing = "the program numactl"
    if mode == "auto":
        print(f"launch.numa=auto: {f'none, as it requires {missing}' if missing else 'node'}.", flush=True)
        return None if missing else "node"
    require(not missing, f"launch.numa={mode} requires {missing}. Use launch.numa=none.")
    return mode
