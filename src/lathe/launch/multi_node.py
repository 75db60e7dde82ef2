"""Several machines in one launch: `launch.nodes`, `launch.endpoint` and `launch.id`. Imports no torch."""

import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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


@contextmanager
def run_lookup_lock(log_dir: Path) -> Iterator[None]:
    """Let one command at a time look up a run directory, or create it, by a lock on the (shared) file system.

    Raises:
        UserError: the file system has no locks.
    """
    if sys.platform == "win32":
        yield
        return
    import fcntl

    log_dir.mkdir(parents=True, exist_ok=True)
    with open(log_dir / ".arriving", "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            raise UserError(
                f"paths.log_dir={log_dir}: its file system has no locks, which launch.id and resume=auto require. "
                "Choose another folder."
            ) from error
        yield
