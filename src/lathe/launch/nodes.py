"""Several machines under one launch: what `launch.nodes`, `launch.endpoint` and `launch.id` say. Imports no torch."""

import os
import re
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lathe.errors import UserError, require
from lathe.files import disk_sentence
from lathe.launch.outer import Outer


@dataclass(frozen=True)
class Nodes:
    """From `least` to `most` machines, which meet at `endpoint` (host:port) and call their launch `launch_id`."""

    least: int = 1
    most: int = 1
    endpoint: str = "localhost:0"
    launch_id: str | None = None

    @property
    def several(self) -> bool:
        """Whether more than one machine can take part."""
        return self.most > 1

    @property
    def address(self) -> str | None:
        """This machine's address on the network that leads to the endpoint, where other machines reach its ranks."""
        if not self.several:
            return None
        host, _, port = self.endpoint.rpartition(":")
        try:
            family, kind, protocol, _, target = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[
                0
            ]
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(target)  # sends nothing
                return str(probe.getsockname()[0])
        except OSError:
            return None


def read_nodes(options: dict[str, Any], outer: Outer | None = None) -> Nodes:
    """What the configuration's `launch` group says about machines. Under srun with one task on each node (`outer`), the
    job gives the endpoint and the name that are null.

    Raises:
        UserError: a number of nodes that is none, several without a place to meet or a name, or a setting that would do
            nothing.
    """
    nodes, endpoint, launch_id = options["nodes"], options["endpoint"], options["id"]
    match = re.fullmatch(r"(\d+)(?::(\d+))?", str(nodes)) if not isinstance(nodes, bool) else None
    least, most = (int(match.group(1)), int(match.group(2) or match.group(1))) if match else (0, 0)
    require(1 <= least <= most, f"launch.nodes={nodes}: give a number from 1, or min:max such as 2:4.")
    require(
        launch_id is None or re.fullmatch(r"[\w.:-]+", str(launch_id)) is not None,
        f"launch.id={launch_id!r}: give a name of letters, digits and . _ - that all nodes share.",
    )
    if most == 1:
        require(
            endpoint is None,
            f"launch.endpoint={endpoint} is where several nodes meet: set launch.nodes, or leave it out.",
        )
        require(
            launch_id is None or outer is None,
            f"launch.id={launch_id}: under torchrun or srun the launcher names the run; leave it out.",
        )
        return Nodes(launch_id=None if launch_id is None else str(launch_id))
    if outer is not None:
        tasks = outer.world_size
        each = outer.launch_id.startswith("slurm:") and os.environ.get("SLURM_NNODES", str(tasks)) == str(tasks)
        require(
            each and least <= tasks <= most,
            f"launch.nodes={nodes} starts the ranks itself, but a launcher has started {tasks} processes: use python "
            "in place of torchrun, or srun with one task on each node.",
        )
        endpoint = endpoint or f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        launch_id = launch_id or outer.launch_id.replace(":", "-")
    require(
        launch_id is not None,
        f"launch.nodes={nodes} needs launch.id, a name that all nodes share: the run directory is found by it.",
    )
    require(
        endpoint is not None,
        f"launch.nodes={nodes} needs launch.endpoint=host:port of one of the nodes, the same on all of them.",
    )
    port = str(endpoint).rpartition(":")[2]
    require(
        ":" in str(endpoint) and port.isdigit() and 0 < int(port) < 65536,
        f"launch.endpoint={endpoint}: give host:port of one of the nodes, the same on all of them.",
    )
    require(
        least == most or options["max_restarts"] > 0,
        f"launch.nodes={nodes} goes on without a lost node by a restart: set launch.max_restarts to how many.",
    )
    return Nodes(least, most, str(endpoint), str(launch_id))


@contextmanager
def arriving(log_dir: Path) -> Iterator[None]:
    """Lets one command at a time look for a run directory and make it if there is none, by a lock on the (shared) file
    system.

    Raises:
        UserError: the place can't be written to, or its file system has no locks.
    """
    if sys.platform == "win32":
        yield
        return
    import fcntl

    try:
        log_dir.mkdir(parents=True, exist_ok=True)
        file = open(log_dir / ".arriving", "a")  # noqa: SIM115
    except OSError as error:
        raise UserError(disk_sentence(error) or f"paths.log_dir={log_dir} can't be made: {error}.") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            raise UserError(
                f"paths.log_dir={log_dir} is on a file system without locks, which launch.id and resume=auto need: "
                "choose another."
            ) from error
        yield
