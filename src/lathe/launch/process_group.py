"""The ranks' process group, its time limit, and which rank did not join a collective.

Lightning and torch use a process group that exists already, so backend and time limit of every strategy are set here.
torch is imported only when a group is needed.
"""

import json
import os
import re
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

TIMED_OUT = re.compile(
    r"Timed out waiting (\d+)ms|collective operation timeout.*?Timeout\(ms\)=(\d+)|wait timeout after (\d+)ms",
    re.DOTALL,
)
CONNECTION_LOST = re.compile(
    r"gloo.*(Connection closed by peer|Connection reset by peer|Broken pipe|Connection refused)",
    re.DOTALL | re.IGNORECASE,
)
START_TIMEOUT = 300.0  # seconds until all ranks have started
WRAPPERS = ("wrapper", "wait", "wait_tensor")  # not the names of collectives
ERROR_PATIENCE = timedelta(seconds=5)  # for rank 0 to report the error that another rank has met

_store: Any = None  # torch's key-value store of the process group


def own_rank() -> int:
    """Return this process's rank as its launcher gives it; 0 for a process that was started by hand."""
    return int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")))


def init_process_group(trainer: dict[str, Any], rank: int, world_size: int, local_rank: int, timeout: float) -> None:
    """Create the default process group, whose collectives time out after `timeout` seconds.

    `trainer` is that group of the configuration: its accelerator and devices choose the backend and this rank's GPU. A
    single rank needs no group.
    """
    global _store
    import torch
    from torch.distributed import distributed_c10d
    from torch.distributed.rendezvous import rendezvous

    if world_size == 1 or torch.distributed.is_initialized():
        return
    limit = timedelta(seconds=timeout)
    # Groups that strategies create take torch's defaults, not the default group's limit.
    distributed_c10d.default_pg_timeout = limit
    if distributed_c10d.default_pg_nccl_timeout is not None:
        distributed_c10d.default_pg_nccl_timeout = limit
    cuda = trainer["accelerator"] in ("auto", "gpu", "cuda") and torch.cuda.is_available()
    if cuda:
        devices = trainer["devices"]
        in_order = local_rank % torch.cuda.device_count()
        torch.cuda.set_device(devices[local_rank] if isinstance(devices, list) else in_order)
    # A rank that starts late does not hang, so the limit is at least START_TIMEOUT until all have arrived.
    patience = timedelta(seconds=max(timeout, START_TIMEOUT))
    store, _, _ = next(rendezvous("env://", rank, world_size, timeout=patience))
    _store = store
    if store.add("arrived", 1) == world_size:
        store.set("complete", "1")
    store.wait(["complete"], patience)
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    torch.distributed.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=limit)


def is_reported_elsewhere(message: str) -> bool:
    """Return whether another rank prints this error: rank 0, or before the process group the first of the machine.

    torch's agent and srun show the output of all ranks, which mostly meet the same error.
    """
    rank = own_rank()
    if _store is None:
        return rank != 0 and os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0")) != "0"
    with suppress(RuntimeError):  # the store was on a rank that has gone, or rank 0 has met no error
        if rank == 0:
            _store.set("error", message)
        else:
            _store.wait(["error"], ERROR_PATIENCE)
            return bool(_store.get("error").decode() == message)
    return False


@dataclass(frozen=True)
class CollectiveTimeout:
    """`rank` gave up in `operation` after `seconds`, or after 0.0 because the others' connections broke first."""

    rank: int
    operation: str
    step: int | None
    seconds: float

    def __str__(self) -> str:
        step = "" if self.step is None else f" (step {self.step})"
        return f"rank {self.rank} waited longer than launch.timeout={self.seconds:g} seconds in {self.operation}{step}"


def find_timeout(error: BaseException) -> CollectiveTimeout | None:
    """The timeout of a collective that `error` or its causes report; None if `error` is something else."""
    cause: BaseException | None = error
    seen: set[int] = set()
    while cause is not None and id(cause) not in seen:  # causes may form a ring
        seen.add(id(cause))
        text = str(cause) if isinstance(cause, RuntimeError) else ""
        timed_out = TIMED_OUT.search(text)
        if timed_out or CONNECTION_LOST.search(text):
            milliseconds = float(next(filter(None, timed_out.groups()))) if timed_out else 0.0
            operation, step = _find_collective(cause.__traceback__)
            step = step if step is not None else _find_collective(error.__traceback__)[1]
            return CollectiveTimeout(own_rank(), operation, step, milliseconds / 1000)
        cause = cause.__cause__ or cause.__context__
    return None


def _find_collective(trace: TracebackType | None) -> tuple[str, int | None]:
    """The collective and the optimizer step that a traceback passes through."""
    operation, step = "a collective", None
    while trace is not None:
        frame = trace.tb_frame
        path, name = frame.f_code.co_filename.replace("\\", "/"), frame.f_code.co_name
        public = name not in WRAPPERS and not name.startswith("_")
        if "/torch/autograd/" in path:
            operation = "the gradients' all_reduce"
        elif "/torch/distributed/" in path and public and not (name == "forward" or "/torch/distributed/utils" in path):
            operation = name
        done = getattr(frame.f_locals.get("trainer"), "global_step", None)
        step = done if step is None and isinstance(done, int) else step
        trace = trace.tb_next
    return operation, step


def save_timeout(
    folder: Path, timeout: CollectiveTimeout, local_ranks: list[int], world_size: int, patience: float = 3.0
) -> None:
    """Save for the elastic agent that this rank gave up, and wait a moment for the other local ranks to do the same.

    A rank without a file then is the one that did not join.
    """
    facts = {"timeout": asdict(timeout), "local_ranks": local_ranks, "world_size": world_size}
    (folder / f"timeout.{timeout.rank}.json").write_text(json.dumps(facts))
    deadline = time.monotonic() + patience
    while len(list(folder.glob("timeout.*"))) < len(local_ranks) and time.monotonic() < deadline:
        time.sleep(0.05)


def take_timeouts(folder: Path) -> str | None:
    """Describe the collective that a rank did not join, and remove the files about it; None if no rank timed out."""
    saved = []
    for path in sorted(folder.glob("timeout.*")):
        with suppress(ValueError):  # the rank was killed while it wrote
            saved.append(json.loads(path.read_text()))
        path.unlink()
    waited = sorted(
        (CollectiveTimeout(**facts["timeout"]) for facts in saved), key=lambda timeout: (-timeout.seconds, timeout.rank)
    )
    if not waited or not waited[0].seconds:
        return None
    local_ranks, absent = saved[0]["local_ranks"], set(saved[0]["local_ranks"]) - {timeout.rank for timeout in waited}
    if absent:
        who = f"rank{'s' if len(absent) > 1 else ''} {', '.join(map(str, sorted(absent)))} did not come"
    elif saved[0]["world_size"] > len(local_ranks):
        who = "a rank on another node did not come"
    else:
        who = "every rank waited, so they called different collectives"
    return f"{waited[0]}: {who}"
