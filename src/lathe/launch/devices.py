"""Machines and processes of a run: `launch.nodes`, `launch.endpoint`, `launch.id` and `trainer.devices`.

Imports torch only if there are GPUs to count.
"""

import os
import socket
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lathe.config.cpu_count import CPU_PROCESSES_PER_CORE
from lathe.errors import UserError, require
from lathe.launch.external_launch import ExternalLaunch


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
            found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)
            family, kind, protocol, _, target = found[0]
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(target)  # sends nothing
                return str(probe.getsockname()[0])
        except OSError:
            return None


def read_nodes(options: dict[str, Any], external: ExternalLaunch | None = None) -> Nodes:
    """Read the machines from the configuration's `launch` group.

    Under srun with one task on each node, the SLURM job gives the endpoint and the name where they are null.

    Raises:
        UserError: an invalid number of nodes, several without an endpoint or a name, or an option without effect.
    """
    nodes, endpoint, launch_id = options["nodes"], options["endpoint"], options["id"]
    least, most = (int(number) for number in (str(nodes).split(":") * 2)[:2])
    require(1 <= least <= most, f"launch.nodes={nodes}: expected a number from 1, or min:max such as 2:4.")
    if most == 1:
        require(endpoint is None, f"launch.endpoint={endpoint} has no effect with launch.nodes=1. Leave it out.")
        require(
            launch_id is None or external is None,
            f"launch.id={launch_id} has no effect under torchrun or srun, which name the run. Leave it out.",
        )
        return Nodes(launch_id=None if launch_id is None else str(launch_id))
    if external is not None:
        tasks = external.world_size
        one_each = external.launch_id.startswith("slurm:") and os.environ.get("SLURM_NNODES", str(tasks)) == str(tasks)
        require(
            one_each and least <= tasks <= most,
            f"launch.nodes={nodes} starts the ranks itself, but a launcher started {tasks} processes. Use python, or "
            "srun with one task on each node.",
        )
        endpoint = endpoint or f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        launch_id = launch_id or external.launch_id.replace(":", "-")
    require(launch_id is not None, f"launch.nodes={nodes} requires launch.id, a name that all nodes share.")
    require(endpoint is not None, f"launch.nodes={nodes} requires launch.endpoint=host:port of one of the nodes.")
    require(
        least == most or options["max_restarts"] > 0,
        f"launch.nodes={nodes} continues without a lost node by a restart. Set launch.max_restarts.",
    )
    return Nodes(least, most, str(endpoint), str(launch_id))


def run_lookup_lock(log_dir: Path) -> AbstractContextManager[Any]:
    """Let one command at a time look up a run directory, or create it, by a lock on the (shared) file system."""
    from filelock import FileLock  # not needed by most commands

    log_dir.mkdir(parents=True, exist_ok=True)
    return FileLock(log_dir / ".arriving")


def count_processes(cfg: dict[str, Any], external: ExternalLaunch | None = None, nodes: Nodes | None = None) -> int:
    """Count the processes of this machine for `trainer.devices`.

    Raises:
        UserError: more devices than there are, an accelerator that is missing, or contradicting numbers of machines.
    """
    nodes = nodes or Nodes()
    trainer, strategy = cfg["trainer"], cfg["strategy"]
    accelerator, devices = trainer["accelerator"], trainer["devices"]
    on_cpu = accelerator == "cpu" or (accelerator == "auto" and devices == 1)
    count = _count_cpu_processes(devices) if on_cpu else _count_gpus(accelerator, devices)
    if external is not None:
        world = count * int(trainer["num_nodes"])
        require(
            external.world_size == world,
            f"trainer.devices x trainer.num_nodes = {world}, but the launcher started {external.world_size} processes. "
            "Make them equal.",
        )
    elif int(trainer["num_nodes"]) not in (1, nodes.most):
        raise UserError(
            f"trainer.num_nodes={trainer['num_nodes']}: start a run on several machines with "
            f"launch.nodes={trainer['num_nodes']}, or with torchrun or srun on each of them."
        )
    one_process = strategy.get("processes") == "one"
    require(
        not (one_process and nodes.several),
        f"launch.nodes={nodes.most} needs a strategy with a process per device, such as strategy=ddp.",
    )
    return 1 if one_process else count


def _count_cpu_processes(devices: Any) -> int:
    if isinstance(devices, list):
        # the schema check reports a device that is named twice
        require(
            len(set(devices)) < len(devices),
            f"trainer.devices={devices} are GPU numbers, and this run is on the CPU. Give a number of processes.",
        )
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
    require(
        available > 0,
        f"trainer.accelerator={accelerator}: no {kind} is visible here. Use trainer.accelerator=cpu or auto.",
    )
    if isinstance(devices, list):
        require(
            all(isinstance(index, int) and 0 <= index < available for index in devices),
            f"trainer.devices={devices} has a GPU that is not here. Give numbers from 0 to {available - 1}.",
        )
        return len(devices)
    count = available if devices in ("auto", -1) else int(devices)
    require(count <= available, f"trainer.devices={devices} asks for {count} GPUs, but {available} are here.")
    return count
