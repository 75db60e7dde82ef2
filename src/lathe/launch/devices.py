"""How many processes a run needs on this machine. Imports torch only if there are GPUs to count."""

import os
from typing import Any

from lathe.config.composed import CPU_PROCESSES_PER_CORE
from lathe.errors import UserError, require
from lathe.launch.nodes import Nodes
from lathe.launch.outer import Outer


def count_processes(cfg: dict[str, Any], outer: Outer | None = None, nodes: Nodes | None = None) -> int:
    """How many processes this node runs for `trainer.devices`.

    Raises:
        UserError: more devices are asked for than there are, an accelerator that is not there, or numbers of machines
            that contradict each other.
    """
    nodes = nodes or Nodes()
    trainer = cfg["trainer"]
    accelerator, devices = trainer["accelerator"], trainer["devices"]
    several = len(devices) if isinstance(devices, list) else devices
    cores = os.cpu_count() or 1
    if accelerator == "cpu" or (accelerator == "auto" and devices == 1):
        require(
            not isinstance(devices, list) or len(set(devices)) < len(devices),  # which is told elsewhere
            f"trainer.devices={devices} names GPUs by their numbers, and this run is on the CPU: give a number of "
            "processes, such as 1.",
        )
        several = 1 if several in ("auto", -1) else several
        require(
            several <= max(8, CPU_PROCESSES_PER_CORE * cores),
            f"trainer.devices={devices} asks for {several} processes on {cores} cores: use at most "
            f"{max(8, CPU_PROCESSES_PER_CORE * cores)}.",
        )
    else:
        import torch

        there = torch.cuda.device_count()
        mps = accelerator == "mps" or (
            accelerator in ("auto", "gpu") and not there and torch.backends.mps.is_available()
        )
        if mps:
            require(
                torch.backends.mps.is_available(),
                "trainer.accelerator=mps: there is none here; use trainer.accelerator=auto.",
            )
            there = 1
        elif accelerator == "auto" and not there:
            return count_processes({**cfg, "trainer": {**trainer, "accelerator": "cpu"}}, outer, nodes)
        require(
            there > 0,
            f"trainer.accelerator={accelerator}: no {'TPU' if accelerator == 'tpu' else 'GPU'} is visible here; use "
            "trainer.accelerator=cpu or auto.",
        )
        several = there if several in ("auto", -1) else several
        require(
            several <= there,
            f"trainer.devices={devices} asks for {several} GPUs, but {there} are here: ask for at most {there}.",
        )
        if isinstance(devices, list):
            require(
                all(isinstance(index, int) and 0 <= index < there for index in devices),
                f"trainer.devices={devices} names a GPU that is not here: give numbers from 0 to {there - 1}.",
            )
    if outer is not None:
        machines, local = int(trainer["num_nodes"]), int(several)
        require(
            outer.world_size == local * machines,
            f"trainer.devices x trainer.num_nodes = {local * machines}, but the launcher started {outer.world_size} "
            "processes: make them equal.",
        )
    elif int(trainer["num_nodes"]) not in (1, nodes.most):
        raise UserError(
            f"trainer.num_nodes={trainer['num_nodes']}: start a run on several machines with "
            f"launch.nodes={trainer['num_nodes']}, or with torchrun or srun on each of them."
        )
    one = cfg["strategy"].get("processes") == "one"
    require(
        not (one and nodes.several),
        f"launch.nodes={nodes.most} and a strategy that drives all devices from one process exclude each "
        "other: use strategy=ddp or another with a process per device.",
    )
    return 1 if one else int(several)
