"""The ranks' process group, its time limit, and which rank waited where when another did not come.

Lightning and torch keep a group that exists, so this is the one place where a strategy's group gets its backend and its
limit. Imports torch only once there is a group to bring up.
"""

import json
import os
import re
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

TIMED_OUT = re.compile(
    r"Timed out waiting (\d+)ms|collective operation timeout.*?Timeout\(ms\)=(\d+)|wait timeout after (\d+)ms",
    re.DOTALL,
)
LOST = re.compile(
    r"gloo.*(Connection closed by peer|Connection reset by peer|Broken pipe|Connection refused)",
    re.DOTALL | re.IGNORECASE,
)
START = 300.0  # seconds
WRAPPERS = ("wrapper", "wait", "wait_tensor")


def bring_up(trainer: dict[str, Any], rank: int, world_size: int, local_rank: int, timeout: float) -> None:
    """Makes the default process group of `world_size` ranks, each of whose collectives may take `timeout` seconds.
    `trainer` is that group of the configuration: its accelerator and devices choose the backend and this rank's GPU. A
    single rank needs no group."""
    import torch
    from torch.distributed import distributed_c10d
    from torch.distributed.rendezvous import rendezvous

    if world_size == 1 or torch.distributed.is_initialized():
        return
    limit = timedelta(seconds=timeout)
    # Groups that strategies split off take torch's defaults, not the default group's own limit.
    distributed_c10d.default_pg_timeout = limit
    if distributed_c10d.default_pg_nccl_timeout is not None:
        distributed_c10d.default_pg_nccl_timeout = limit
    cuda = trainer["accelerator"] in ("auto", "gpu", "cuda") and torch.cuda.is_available()
    if cuda:
        devices = trainer["devices"]
        torch.cuda.set_device(
            devices[local_rank] if isinstance(devices, list) else local_rank % torch.cuda.device_count()
        )
    # A rank that starts late is not one that hangs: until all have come, the limit is not shorter than START.
    patience = timedelta(seconds=max(timeout, START))
    store, _, _ = next(rendezvous("env://", rank, world_size, timeout=patience))
    if store.add("arrived", 1) == world_size:
        store.set("complete", "1")
    store.wait(["complete"], patience)
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    torch.distributed.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=limit)


@dataclass(frozen=True)
class Waited:
    """What rank `rank` was waiting in when it gave up, after `seconds`; 0.0 if the others' connections broke before its
    own limit.
    """

    rank: int
    operation: str
    step: int | None
    seconds: float

    def __str__(self) -> str:
        step = "" if self.step is None else f" (step {self.step})"
        return f"rank {self.rank} waited longer than launch.timeout={self.seconds:g} seconds in {self.operation}{step}"


def waited(error: BaseException) -> Waited | None:
    """Where this rank gave up waiting for another, or None if `error` is something else."""
    cause: BaseException | None = error
    seen: set[int] = set()
    while cause is not None and id(cause) not in seen:  # a sentence that is raised from its own wrapper makes a ring
        seen.add(id(cause))
        text = str(cause) if isinstance(cause, RuntimeError) else ""
        match = TIMED_OUT.search(text)
        if match or LOST.search(text):
            milliseconds = float(next(filter(None, match.groups()))) if match else 0.0
            operation, step = _place(cause.__traceback__)
            rank = int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")))
            return Waited(
                rank, operation, step if step is not None else _place(error.__traceback__)[1], milliseconds / 1000
            )
        cause = cause.__cause__ or cause.__context__
    return None


def _place(trace: TracebackType | None) -> tuple[str, int | None]:
    """The collective and the optimizer step that a traceback has passed through."""
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


def leave_note(folder: Path, restart: int, note: Waited, local_ranks: list[int], patience: float = 3.0) -> None:
    """Writes down for this machine's agent that a rank gave up, and stays until its neighbours had a moment to do the
    same: whoever has left no note then is the one that did not come."""
    (folder / f"waited.{restart}.{note.rank}.json").write_text(json.dumps(asdict(note)))
    deadline = time.monotonic() + patience
    while len(_notes(folder, restart)) < len(local_ranks) and time.monotonic() < deadline:
        time.sleep(0.05)


def _notes(folder: Path, restart: int) -> list[Waited]:
    notes = []
    for path in sorted(folder.glob(f"waited.{restart}.*.json")):
        try:
            notes.append(Waited(**json.loads(path.read_text())))
        except ValueError:  # its rank was killed while it wrote
            continue
    return sorted(notes, key=lambda note: (-note.seconds, note.rank))


def read_notes(folder: Path, restart: int, local_ranks: list[int], world_size: int) -> str | None:
    """What the notes of a start of the workers say together, or None if no rank ran into the limit."""
    notes = _notes(folder, restart)
    if not notes or not notes[0].seconds:
        return None
    absent = sorted(set(local_ranks) - {note.rank for note in notes})
    if absent:
        who = f"rank{'s' if len(absent) > 1 else ''} {', '.join(map(str, absent))} did not come"
    elif world_size > len(local_ranks):
        who = "a rank on another node did not come"
    else:
        who = "every rank waited, so they called different collectives"
    return f"{notes[0]}: {who}"
