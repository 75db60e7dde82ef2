"""What the training epochs of a run took: seconds, memory, and how far its processes are apart."""

import math
import platform
from collections import Counter
from statistics import mean, median
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Trainer
from torch.nn.parallel import DistributedDataParallel

from lathe.measure.processes import everyones
from lathe.measure.resident import peak_resident

Window = tuple[int, int, float, float, float | None]  # batches, units, seconds, waited, grad_sync


class Told(NamedTuple):
    """What one process says at the end of an epoch."""

    name: str  # host:rank
    own_ms: float  # of a batch, without its wait for other processes; nan where that is not known
    resident: int  # bytes
    gpu: int  # bytes; 0 without one


class Epochs:
    """The epochs of a fit, kept by each process; `state` goes into a checkpoint, so that an epoch that was interrupted
    has its whole time."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.before = float(state.get("seconds", 0.0))  # of the epoch under way, in earlier processes
        self.whole: list[float] = list(state.get("whole", []))  # seconds of each epoch that came to its end
        self.own: list[tuple[float, float]] = []  # milliseconds of the fastest process and the slowest, by epoch
        self.slowest: list[str] = []
        self.peaks = {"resident": 0, "gpu": 0}
        self._begin()

    def _begin(self) -> None:
        self.seconds, self.batches = 0.0, 0  # of this process
        self.waits: list[float] = []  # seconds that sampled steps waited for other processes

    def state(self, running: float) -> dict[str, Any]:
        """With `running` seconds that have not been spent yet."""
        return {"seconds": self.before + self.seconds + running, "whole": list(self.whole)}

    def end(self, trainer: Trainer, wait: float | None, timed: bool) -> dict[str, float]:
        """The metrics of the epoch that ends; a collective. `wait` is that of the newest sampled step, `timed` whether
        steps are sampled at all. Only an epoch of all its batches has any."""
        self.waits += [wait] if wait is not None and not self.waits else []
        each = everyones(self._told(trainer))
        self._peak(each)
        if not trainer.fit_loop.epoch_loop.batch_progress.is_last_batch or not self.before + self.seconds:
            return {}
        found = {"epoch_s": self.before + self.seconds}
        self.whole.append(found["epoch_s"])
        if timed:
            found |= self._spread(each)
        self.before = 0.0
        self._begin()
        return found

    def _told(self, trainer: Trainer) -> Told:
        device = trainer.strategy.root_device
        own = (
            1e3 * max(0.0, self.seconds / self.batches - mean(self.waits)) if self.waits and self.batches else math.nan
        )
        gpu = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
        return Told(f"{platform.node()}:{trainer.global_rank}", own, peak_resident(), gpu)

    def _peak(self, each: list[Told]) -> None:
        self.peaks = {name: max(known, *(getattr(one, name) for one in each)) for name, known in self.peaks.items()}

    def _spread(self, each: list[Told]) -> dict[str, float]:
        own = [one.own_ms for one in each]
        if any(map(math.isnan, own)):
            return dict.fromkeys(("rank_ms_min", "rank_ms_max", "slowest_rank"), math.nan)
        self.own.append((min(own), max(own)))
        self.slowest.append(each[own.index(max(own))].name)
        return {"rank_ms_min": min(own), "rank_ms_max": max(own), "slowest_rank": float(own.index(max(own)))}

    def summary(self) -> dict[str, Any]:
        """Medians over the run's epochs, the largest memory of a process, and the name of the process that was slowest
        in most epochs; None for what is not known."""
        fastest, slowest = zip(*self.own, strict=True) if self.own else ((), ())
        return {
            "epoch_s": median(self.whole) if self.whole else None,
            "peak_gpu_bytes": self.peaks["gpu"] or None,
            "peak_resident_bytes": self.peaks["resident"] or None,
            "rank_ms_min": median(fastest) if fastest else None,
            "rank_ms_max": median(slowest) if slowest else None,
            "slowest_rank": Counter(self.slowest).most_common(1)[0][0] if self.slowest else None,
        }


def waited_in_backward(reducer: DistributedDataParallel | None) -> float | None:
    """Seconds that backward of DDP's newest sampled step waited for other processes; None where none was sampled."""
    data = {} if reducer is None else reducer._get_ddp_logging_data()
    if data.get("backward_comm_time", 0) <= 0:
        return None
    return max(0.0, 1e-9 * (data["backward_comm_time"] - data.get("backward_compute_comm_overlap_time", 0)))


def is_nan(value: Any) -> bool:
    return isinstance(value, float) and math.isnan(value)
