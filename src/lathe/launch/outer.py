"""Launchers that start the ranks themselves: torchrun, SLURM's srun and horovodrun. Imports no torch until ranks have
to talk.

Each rank has then composed the configuration on its own, so rank 0's is sent to the others: a random sampler, a clock
or a file edited in between can't give the ranks different hyper-parameters.
"""

import os
import socket
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any

from lathe.errors import UserError
from lathe.launch.group import START, bring_up


@dataclass
class Outer:
    """What an outer launcher says about this process. `launch_id` is the same on all ranks and after a restart."""

    launch_id: str
    rank: int
    local_rank: int
    world_size: int
    restarted: bool

    def __enter__(self) -> "Outer":
        return self

    def __exit__(self, *_: object) -> None:
        """Ends the process group: gloo aborts a process that ends with one."""
        import torch

        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()

    def send(self, cfg: dict[str, Any]) -> None:
        """Sends rank 0's configuration to all other ranks."""
        self._broadcast(cfg, [cfg])

    def dismiss(self, cfg: dict[str, Any]) -> None:
        """Tells all other ranks that there is nothing to do."""
        self._broadcast(cfg, [None])

    def receive(self, typed: dict[str, Any]) -> dict[str, Any] | None:
        """Waits for rank 0's configuration, or None if there is nothing to do. Of what was `typed` here only the device
        and the time limit are used, to be able to."""
        box: list[Any] = [None]
        self._broadcast(typed, box)
        assert box[0] is None or isinstance(box[0], dict)
        return box[0]

    def _broadcast(self, cfg: dict[str, Any], box: list[Any]) -> None:
        """Brings up the process group that Lightning goes on to use (it keeps one that exists) and sends `box` from
        rank 0.
        """
        import torch

        bring_up(cfg["trainer"], self.rank, self.world_size, self.local_rank, cfg["launch"]["timeout"])
        if self.world_size > 1:
            torch.distributed.broadcast_object_list(box, src=0, device=torch.device("cpu"))


def detect_outer() -> Outer | None:
    """The launcher around this process, or None if it was started by hand.

    Raises:
        UserError: a launch over several nodes that has no name, so that its ranks could not find one directory; or a
            launcher that was given options with which the ranks can't be told apart.
    """
    env = os.environ
    if "TORCHELASTIC_RUN_ID" in env and "RANK" in env:
        run_id, world, local = env["TORCHELASTIC_RUN_ID"], int(env["WORLD_SIZE"]), int(env.get("LOCAL_WORLD_SIZE", "1"))
        if (
            run_id == "none"
        ):  # torchrun without --rdzv-id: the agent's process stands for the launch, which only one machine can see
            if local != world:
                raise UserError(
                    "torchrun on several nodes needs --rdzv-id, a name that all nodes share: the run directory is "
                    "found by it."
                )
            run_id = f"torchrun-{os.getppid()}-{env.get('MASTER_PORT', '')}"
        restarts = int(env.get("TORCHELASTIC_RESTART_COUNT", "0"))
        return Outer(f"torchrun:{run_id}", int(env["RANK"]), int(env["LOCAL_RANK"]), world, restarts > 0)
    if (
        "HOROVOD_RANK" in env and "HOROVOD_GLOO_RENDEZVOUS_ADDR" in env
    ):  # before SLURM: horovodrun may run inside an allocation
        return _horovodrun()
    if "SLURM_JOB_ID" in env and "SLURM_PROCID" in env and int(env.get("SLURM_NTASKS", "1")) > 1:
        if env.get("SLURM_JOB_NAME") in ("bash", "interactive"):  # a shell inside an allocation, not a task of srun
            return None
        if env["SLURM_PROCID"] == "0" and "SLURM_STEP_ID" not in env:  # a batch script that calls python without srun
            return None
        _slurm_rendezvous()
        restarted = int(env.get("SLURM_RESTART_COUNT", "0")) > 0
        rank, local, world = (int(env[name]) for name in ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS"))
        return Outer(f"slurm:{env['SLURM_JOB_ID']}", rank, local, world, restarted)
    return None


def _slurm_rendezvous() -> None:
    """Where the ranks meet: the first node of the job, at a port made from the job's number, as Lightning derives
    them.
    """
    from lightning.fabric.plugins.environments import SLURMEnvironment

    try:
        environment = SLURMEnvironment(auto_requeue=False)
    except RuntimeError as error:  # --ntasks alone does not say how many tasks a node has
        raise UserError("srun was given --ntasks alone: give --nodes and --ntasks-per-node in its place.") from error
    os.environ.setdefault("MASTER_ADDR", environment.main_address)
    os.environ.setdefault("MASTER_PORT", str(environment.main_port))


def _horovodrun() -> Outer:
    """A rank of horovodrun. Torch's group meets where rank 0 says, which it tells the others through horovodrun's own
    table of keys: horovodrun may have been started on a machine that no rank runs on."""
    env = os.environ
    if env.get("HOROVOD_ELASTIC"):
        raise UserError(
            "horovodrun with --min-np is not supported: leave it out, or let launch.nodes=min:max start the ranks."
        )
    rank, local, world = (int(env[f"HOROVOD_{name}"]) for name in ("RANK", "LOCAL_RANK", "SIZE"))
    address = f"{env['HOROVOD_GLOO_RENDEZVOUS_ADDR']}:{env['HOROVOD_GLOO_RENDEZVOUS_PORT']}"
    if rank == 0:
        host = "localhost" if env["HOROVOD_LOCAL_SIZE"] == env["HOROVOD_SIZE"] else env["HOROVOD_HOSTNAME"]
        with socket.socket() as free:
            free.bind(("", 0))
            meeting = f"{host}:{free.getsockname()[1]}"
        _horovod_table(address, meeting)
    else:
        meeting = _horovod_table(address)
    host, _, port = meeting.rpartition(":")
    # torchrun's names: Lightning takes them before SLURM's, which would say that every rank is rank 0.
    env.update(
        MASTER_ADDR=host,
        MASTER_PORT=port,
        RANK=str(rank),
        LOCAL_RANK=str(local),
        WORLD_SIZE=str(world),
        LOCAL_WORLD_SIZE=env["HOROVOD_LOCAL_SIZE"],
        GROUP_RANK=env["HOROVOD_CROSS_RANK"],
        TORCHELASTIC_RUN_ID=f"horovodrun-{address}",
    )
    return Outer(f"horovodrun:{address}", rank, local, world, False)


def _horovod_table(address: str, meeting: str | None = None) -> str:
    """Writes where the ranks meet into horovodrun's table, or waits until rank 0 has."""
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({})
    )  # a proxy is for the world outside the cluster
    data = None if meeting is None else meeting.encode()
    request = urllib.request.Request(f"http://{address}/lathe/meeting", data, method="GET" if data is None else "PUT")
    deadline = time.monotonic() + START
    while True:
        try:
            with opener.open(request, timeout=START) as answer:
                return meeting or str(answer.read().decode())
        except (urllib.error.URLError, OSError) as error:
            missing = isinstance(error, urllib.error.HTTPError) and error.code == 404  # rank 0 is still on its way
            if not missing or time.monotonic() > deadline:
                raise UserError(f"horovodrun does not answer at {address}: start all ranks again.") from error
            time.sleep(0.05)
