"""Count the processes that a run needs on this machine. Imports torch only if there are GPUs to count."""

import os
from typing import Any

from lathe.config.cpu_count import CPU_PROCESSES_PER_CORE
from lathe.errors import UserError, require
from lathe.launch.external_launch import ExternalLaunch
from lathe.launch.multi_node import Nodes


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
