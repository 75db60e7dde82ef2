"""Support for torchrun, SLURM's srun and horovodrun, which start the ranks themselves.

Each rank composes its own configuration then, so rank 0 sends its configuration to the others: a random sampler, a
clock or an edited file can't give the ranks different hyper-parameters. torch is imported only to communicate.
"""

import os
import socket
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any

from lathe.errors import UserError, require
from lathe.launch.process_group import START_TIMEOUT, init_process_group


@dataclass
class ExternalLaunch:
    """This process's place in a launch. `launch_id` is the same on all ranks, and after a restart."""

    launch_id: str
    rank: int
    local_rank: int
    world_size: int
    restarted: bool

    def __enter__(self) -> "ExternalLaunch":
        return self

    def __exit__(self, *_: object) -> None:
        """Destroy the process group: gloo aborts a process that exits with one."""
        import torch

        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()

    def broadcast(self, own: dict[str, Any], sent: dict[str, Any] | None = None) -> dict[str, Any] | None:
        """Return what rank 0 has `sent`: its configuration, or None if there is nothing to do.

        This rank's `own` gives the device and the time limit of the process group, which Lightning uses later.
        """
        import torch

        init_process_group(own["trainer"], self.rank, self.world_size, self.local_rank, own["launch"]["timeout"])
        box = [sent]
        if self.world_size > 1:
            torch.distributed.broadcast_object_list(box, src=0, device=torch.device("cpu"))
        return box[0]


def detect_external_launch() -> ExternalLaunch | None:
    """The launcher that started this process as one of its ranks; None for a command typed by hand."""
    env = os.environ
    if "TORCHELASTIC_RUN_ID" in env and "RANK" in env:
        run_id, world = env["TORCHELASTIC_RUN_ID"], int(env["WORLD_SIZE"])
        if run_id == "none":  # without --rdzv-id the agent's process identifies the launch, on one machine only
            is_one_node = int(env.get("LOCAL_WORLD_SIZE", "1")) == world
            require(is_one_node, "torchrun on several nodes requires --rdzv-id, the same name on all of them.")
            run_id = f"torchrun-{os.getppid()}-{env.get('MASTER_PORT', '')}"
        restarted = int(env.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
        return ExternalLaunch(f"torchrun:{run_id}", int(env["RANK"]), int(env["LOCAL_RANK"]), world, restarted)
    if "HOROVOD_RANK" in env and "HOROVOD_GLOO_RENDEZVOUS_ADDR" in env:  # before SLURM: it may run in an allocation
        return _horovodrun()
    if "SLURM_JOB_ID" in env and "SLURM_PROCID" in env and int(env.get("SLURM_NTASKS", "1")) > 1:
        shell = env.get("SLURM_JOB_NAME") in ("bash", "interactive")
        batch_script = env["SLURM_PROCID"] == "0" and "SLURM_STEP_ID" not in env
        return None if shell or batch_script else _srun()
    return None


def _srun() -> ExternalLaunch:
    """The ranks meet at the first node of the job, at a port made from the job's number, as Lightning derives them."""
    from lightning.fabric.plugins.environments import SLURMEnvironment

    env = os.environ
    try:
        slurm = SLURMEnvironment(auto_requeue=False)
    except RuntimeError as error:  # --ntasks does not say how many tasks a node has
        raise UserError("srun --ntasks is not enough. Use --nodes and --ntasks-per-node instead.") from error
    env.setdefault("MASTER_ADDR", slurm.main_address)
    env.setdefault("MASTER_PORT", str(slurm.main_port))
    restarted = int(env.get("SLURM_RESTART_COUNT", "0")) > 0
    rank, local, world = (int(env[name]) for name in ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS"))
    return ExternalLaunch(f"slurm:{env['SLURM_JOB_ID']}", rank, local, world, restarted)


def _horovodrun() -> ExternalLaunch:
    """Rank 0 chooses where torch's process group meets, and shares it through horovodrun's key-value store.

    horovodrun itself may run on a machine without ranks.
    """
    env = os.environ
    require(not env.get("HOROVOD_ELASTIC"), "horovodrun --min-np is not supported. Use launch.nodes=min:max instead.")
    rank, local, world = (int(env[f"HOROVOD_{name}"]) for name in ("RANK", "LOCAL_RANK", "SIZE"))
    store = f"{env['HOROVOD_GLOO_RENDEZVOUS_ADDR']}:{env['HOROVOD_GLOO_RENDEZVOUS_PORT']}"
    meeting = None
    if rank == 0:
        host = "localhost" if env["HOROVOD_LOCAL_SIZE"] == env["HOROVOD_SIZE"] else env["HOROVOD_HOSTNAME"]
        with socket.socket() as free:
            free.bind(("", 0))
            meeting = f"{host}:{free.getsockname()[1]}".encode()
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # no proxy inside the cluster
    request = urllib.request.Request(f"http://{store}/lathe/meeting", meeting, method="PUT" if meeting else "GET")
    deadline = time.monotonic() + START_TIMEOUT
    while True:
        try:
            with opener.open(request, timeout=START_TIMEOUT) as answer:
                host, _, port = (meeting or answer.read()).decode().rpartition(":")
            break
        except OSError as error:
            not_yet = isinstance(error, urllib.error.HTTPError) and error.code == 404
            if not not_yet or time.monotonic() > deadline:
                raise UserError(f"horovodrun does not answer at {store}. Start all ranks again.") from error
            time.sleep(0.05)
    # torchrun's names: Lightning reads them before SLURM's, which say that every rank is rank 0.
    env.update(
        MASTER_ADDR=host,
        MASTER_PORT=port,
        RANK=str(rank),
        LOCAL_RANK=str(local),
        WORLD_SIZE=str(world),
        LOCAL_WORLD_SIZE=env["HOROVOD_LOCAL_SIZE"],
        GROUP_RANK=env["HOROVOD_CROSS_RANK"],
        TORCHELASTIC_RUN_ID=f"horovodrun-{store}",
    )
    return ExternalLaunch(f"horovodrun:{store}", rank, local, world, False)
