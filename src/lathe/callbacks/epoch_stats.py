"""Seconds, memory and rank imbalance of the training epochs of a run."""

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

Window = tuple[int, int, float, float, float | None]  # batches, units, seconds, seconds waited, grad_sync


class RankReport(NamedTuple):
    """Measurements of one rank at the end of an epoch."""

    name: str  # host:rank
    own_ms: float  # of a batch, without the wait for other ranks; nan if unknown
    resident: int  # bytes
    gpu: int  # bytes; 0 without a GPU


class EpochStats:
    """Epoch statistics of a fit on each rank; `state` is saved for interrupted epochs."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.before = float(state.get("seconds", 0.0))  # of the current epoch, in earlier processes
        self.whole: list[float] = list(state.get("whole", []))  # seconds of each completed epoch
        self.own: list[tuple[float, float]] = []  # milliseconds of the fastest and the slowest rank, by epoch
        self.slowest: list[str] = []
        self.peaks = {"resident": 0, "gpu": 0}
        self._start_epoch()

    def _start_epoch(self) -> None:
        self.seconds, self.batches = 0.0, 0  # of this process
        self.waits: list[float] = []  # seconds that sampled steps waited for other ranks

    def state(self, running: float) -> dict[str, Any]:
        """Return the state to save; `running` seconds are not in `seconds` yet."""
        return {"seconds": self.before + self.seconds + running, "whole": list(self.whole)}

    def end(self, trainer: Trainer, wait: float | None, timed: bool) -> dict[str, float]:
        """Return the metrics of the epoch that ends; empty if it was cut short. A collective.

        `wait` is that of the newest sampled step; `timed` is True if steps are sampled at all.
        """
        self.waits += [wait] if wait is not None and not self.waits else []
        reports = everyones(self._report(trainer))
        self.peaks = {name: max(known, *(getattr(one, name) for one in reports)) for name, known in self.peaks.items()}
        if not trainer.fit_loop.epoch_loop.batch_progress.is_last_batch or not self.before + self.seconds:
            return {}
        found = {"epoch_s": self.before + self.seconds}
        self.whole.append(found["epoch_s"])
        if timed:
            found |= self._imbalance(reports)
        self.before = 0.0
        self._start_epoch()
        return found

    def _report(self, trainer: Trainer) -> RankReport:
        device, own_ms = trainer.strategy.root_device, math.nan
        if self.waits and self.batches:
            own_ms = 1e3 * max(0.0, self.seconds / self.batches - mean(self.waits))
        gpu = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
        return RankReport(f"{platform.node()}:{trainer.global_rank}", own_ms, peak_resident(), gpu)

    def _imbalance(self, reports: list[RankReport]) -> dict[str, float]:
        own = [one.own_ms for one in reports]
        if any(map(math.isnan, own)):
            return dict.fromkeys(("rank_ms_min", "rank_ms_max", "slowest_rank"), math.nan)
        self.own.append((min(own), max(own)))
        self.slowest.append(reports[own.index(max(own))].name)
        return {"rank_ms_min": min(own), "rank_ms_max": max(own), "slowest_rank": float(own.index(max(own)))}

    def summary(self) -> dict[str, Any]:
        """Return medians over the epochs, a rank's peak memory, and the most often slowest rank, or None."""
        fastest, slowest = zip(*self.own, strict=True) if self.own else ((), ())
        return {
            "epoch_s": median(self.whole) if self.whole else None,
            "peak_gpu_bytes": self.peaks["gpu"] or None,
            "peak_resident_bytes": self.peaks["resident"] or None,
            "rank_ms_min": median(fastest) if fastest else None,
            "rank_ms_max": median(slowest) if slowest else None,
            "slowest_rank": Counter(self.slowest).most_common(1)[0][0] if self.slowest else None,
        }


def wait_for_ranks(trainer: Trainer, reducer: DistributedDataParallel | None) -> float | None:
    """Return the seconds that a step waits for other ranks, or None if DDP has sampled no step.

    That is the newest sampled step's wait for gradients, and the mean wait for the other ranks' numbers of samples.
    """
    data = {} if reducer is None else reducer._get_ddp_logging_data()
    if data.get("backward_comm_time", 0) <= 0:
        return None
    window = getattr(trainer.fit_loop.epoch_loop, "window", None)  # of lathe.Trainer
    counts = 0.0 if window is None else window.mean_wait()
    return counts + max(0.0, 1e-9 * (data["backward_comm_time"] - data.get("backward_compute_comm_overlap_time", 0)))


def is_nan(value: Any) -> bool:
    return isinstance(value, float) and math.isnan(value)
