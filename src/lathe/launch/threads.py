"""How many threads of a CPU each process computes with, `launch.threads`."""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lathe.config.cores import allowed, physical_cores


@contextmanager
def threads_of(cfg: dict[str, Any]) -> Iterator[None]:
    """Lets torch compute with as many threads as `launch.threads` of the command says; as many as it would for null.

    `auto` takes the physical cores that this process may use over the processes on this machine: two threads of one
    core share its units for products, and threads beyond a container's share of CPU time wait for each other.
    """
    wanted = cfg.get("request", cfg).get("launch", {}).get("threads")
    count = _count(wanted) if wanted is not None else None
    if count is None:
        yield
        return
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)  # for who trains from Python


def _count(wanted: int | str) -> int | None:
    """How many; None where the environment says it. Rank 0 tells what `auto` took."""
    cores, local = physical_cores(), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    several = f"{local} process{'es' * (local > 1)}"
    if isinstance(wanted, int):
        if wanted * local > len(allowed()):
            warnings.warn(
                f"launch.threads={wanted} for {several} are more than the {len(allowed())} CPUs here, and wait for "
                "each other: use auto.",
                stacklevel=4,
            )
        return wanted
    given = os.environ.get("OMP_NUM_THREADS")
    count = max(1, cores // local) if given is None else None
    taken = f" took {count}: {cores} physical core{'s' * (cores > 1)} over {several}."
    said = taken if count else f": OMP_NUM_THREADS={given} says it already, and stays."
    if int(os.environ.get("RANK", "0")) == 0:
        print(f"launch.threads=auto{said}", flush=True)
    return count
