"""Measure training speed and its waits."""

import math
import platform
from collections import Counter
from collections.abc import Callable, Mapping
from statistics import mean, median
from time import perf_counter
from typing import Any, NamedTuple, TypeVar

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lathe.callbacks.module_access import count_units, net_of, task_of
from lathe.compression.modes import without_memory
from lathe.config.types import Count, Positive
from lathe.config.validation import validated
from lathe.measure.flops import count_flops, net_input, peak_flops
from lathe.measure.processes import everyones, peak_resident

T = TypeVar("T")
_DTYPES = {"16": torch.float16, "bf16": torch.bfloat16, "32": torch.float32}


def try_count(count: Callable[[], T]) -> T | None:
    """Return `count()`, or None with a warning if the net can't be copied or its operations can't be counted."""
    try:
        return count()
    except Exception as error:
        rank_zero_warn(
            f"throughput/mfu is left out: the net's operations can't be counted ({type(error).__name__}: {error})."
        )
        return None


RESULTS = ("step_ms", "data_wait", "grad_sync", "mfu", "epoch_s", "peak_gpu_bytes", "peak_resident_bytes")
TIMED = ("cpu", "cuda")  # devices for which DDP's reducer has a timer


class Window(NamedTuple):
    """Measurements of consecutive batches."""

    batches: int
    units: int  # samples or tokens
    seconds: float
    waited: float  # seconds, for the loader
    grad_sync: float | None  # share of the time; nan if not sampled, None without DDP


class Throughput(Callback):
    """Log `throughput/*` once per window of training steps and once per epoch, of rank 0.

    Per window:

    - `samples_per_s`, or `tokens_per_s` if the task counts tokens (`task.unit`, `task.count_units(batch)`): over all
      replicas, each taken to have a batch as large as this one's.
    - `step_ms`: wall-clock milliseconds per batch, the mean of the window.
    - `data_wait`: share of the time between asking the loader for a batch and the start of its step, with transfer and
      augmentation. On a GPU it is the host's share: the device may still run earlier steps.
    - `grad_sync`: under DDP on several ranks, share of the time that backward waits for other ranks' gradients after
      its own computation, from the timers of DDP's reducer in one sampled step per window. nan if a resumed run saw
      only a window's first step, which is never sampled.
    - `mfu`: model FLOP/s, three times the forward pass's (PaLM, arXiv:2204.02311, appendix B), over the peak of all
      devices that share the net. Counted on a meta-device copy, made before a strategy shards the net. Not if the peak
      is unknown, nor for a user's LightningModule.

    Validation, checkpoints, the time between epochs and the first steps do not count. A GPU is synchronized only at the
    edges of a window and of such a pause. Windows end at batches `skip_steps + k * window` of the run, so that a
    resumed run writes the same rows. The row of an interrupted window covers this process's batches, and its warm-up
    only if nothing else.

    Per complete training epoch:

    - `epoch_s`: wall-clock seconds of its batches, including the first steps and the wait for data, also before a
      resume.
    - `rank_ms_min`, `rank_ms_max`, `slowest_rank`: under DDP on several ranks, milliseconds per batch of the fastest
      and of the slowest rank, without the wait in backward, and the number of the slowest. A wait in the forward pass
      (synchronized BatchNorm) counts as a rank's own time. nan if no step was sampled.

    `summary` adds a rank's peak memory: torch's GPU allocations since training began, and the process's resident set.

    Args:
        window: batches per measurement; None is `trainer.log_every_n_steps`.
        skip_steps: batches at the start of each process that are not measured: compilation, autotuning, caches.
        peak_flops: FLOP/s of one device; None looks the GPU's name up in `lathe.measure.flops`.
    """

    @validated
    def __init__(self, window: Count | None = None, skip_steps: Count = 10, peak_flops: Positive | None = None) -> None:
        self.window, self.skip_steps, self.peak_flops = window, skip_steps, peak_flops
        self._twin: nn.Module | None = None
        self._restored: dict[str, Any] = {}
        self._clear()

    def _clear(self) -> None:
        self._epochs = EpochStats(self._restored)
        self._reducer: DistributedDataParallel | None = None  # has the timers of the wait for other ranks
        self._seen = 0  # batches of this process
        self._paused = True  # the time since `_mark` is not training time
        self._mark = self._asked = self._begun = 0.0
        self._units = self._batches = 0  # of the current window
        self._seconds = self._waited = 0.0
        self._unit = "samples"
        self._flops_per_unit: float | None = None
        self._windows: list[Window] = []

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            # "transformer-engine" and "64-true" have no column in the table of peaks
            dtype = _DTYPES.get(str(trainer.precision).split("-")[0], torch.float64)
            self._peak = self.peak_flops or peak_flops(trainer.strategy.root_device, dtype)
            known = task_of(pl_module) is pl_module  # how a user's module uses a batch is unknown
            if self._peak and trainer.is_global_zero and known:
                self._twin = try_count(lambda: without_memory(net_of(pl_module)))

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._clear()
        device, model = trainer.strategy.root_device, trainer.strategy.model
        self._cuda = device.type == "cuda"
        if self._cuda:
            torch.cuda.reset_peak_memory_stats(device)
        sampler: dict[str, Any] = getattr(trainer.strategy, "distributed_sampler_kwargs", None) or {}
        self._replicas = int(sampler.get("num_replicas", 1))
        self._share = trainer.world_size / self._replicas  # devices that hold one replica together
        self._unit = str(getattr(task_of(pl_module), "unit", "samples"))
        self._size = self.window or trainer.log_every_n_steps or 50  # type: ignore[attr-defined]
        if isinstance(model, DistributedDataParallel) and device.type in TIMED:
            self._reducer = model
            model._set_ddp_runtime_logging_sample_rate(self._size)
        # Lightning has no public hook before a batch is fetched; the loop looks this one up at the start of each epoch.
        self._progress = trainer.fit_loop.epoch_loop.batch_progress.total
        loop, ask = trainer.fit_loop.epoch_loop, type(trainer.fit_loop.epoch_loop)._on_before_fetch

        def on_before_fetch() -> None:
            self._asked = perf_counter()
            ask(loop)

        loop._on_before_fetch = on_before_fetch  # type: ignore[method-assign]

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._pause()
        if self._seen > self.skip_steps and self._batches:
            self._close(trainer)
        vars(trainer.fit_loop.epoch_loop).pop("_on_before_fetch", None)

    def skippable_steps(self, trainer: Trainer) -> float:
        """Count the steps inside a window, without the first one after a pause."""
        if self._paused or self._twin is not None:
            return 0
        since = self._progress.ready - self.skip_steps
        warm = self.skip_steps - self._seen - 1
        edge = self._size - 1 - since % self._size if since >= 0 else -since + self._size - 1
        return min(edge, warm) if warm >= 0 else edge

    def can_defer_log(self, trainer: Trainer) -> bool:
        """Return whether the next needed step ends a window, whose row can be deferred."""
        return not self._paused and self._twin is None and self._seen >= self.skip_steps

    def deferred_row(self, trainer: Trainer) -> dict[str, float]:
        """End a window and return its row."""
        self._tick(synchronize=True)
        row = _row(self._close(trainer))
        self._begin_window()
        return row

    def on_skipped_steps(self, trainer: Trainer, pl_module: LightningModule, batches: list[Any], waited: float) -> None:
        """Count a group of steps."""
        self._count(len(batches), sum(count_units(pl_module, batch) for batch in batches))
        self._waited += waited

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._twin is not None:
            twin, self._twin, x = self._twin, None, net_input(batch)
            flops = try_count(lambda: 3.0 * count_flops(twin, x[:1].to("meta")) * len(x))
            self._flops_per_unit = None if flops is None else flops / max(1, count_units(pl_module, batch))
        now = perf_counter()
        self._begun = self._asked or now  # the last batch of an epoch was prefetched
        self._waited += now - self._begun
        self._asked = 0.0

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._count(1, count_units(pl_module, batch))
        since = self._progress.ready - self.skip_steps  # batches of the run since its warm-up
        edge, warm = since > 0 and since % self._size == 0, self._seen == self.skip_steps
        self._tick(synchronize=edge or warm)
        if edge:
            _log(trainer, self._close(trainer))
        if edge or warm:
            self._begin_window()

    def _count(self, batches: int, units: int) -> None:
        self._seen += batches
        self._batches += batches
        self._epochs.batches += batches
        self._units += units

    def _tick(self, synchronize: bool) -> None:
        """Add the time up to now to the training time."""
        if synchronize and self._cuda:
            torch.cuda.synchronize()
        now = perf_counter()
        seconds = now - (self._begun if self._paused else self._mark)
        self._seconds += seconds
        self._epochs.seconds += seconds
        self._paused, self._mark = False, now

    def _begin_window(self) -> None:
        self._seconds = self._waited = 0.0
        self._units = self._batches = 0
        self._mark = perf_counter()  # excludes the time that writing the row took

    def _pause(self) -> None:
        if not self._paused:
            self._tick(synchronize=True)
            self._paused = True

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._pause()
        _log(trainer, self._epochs.end(trainer, self._reducer))

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._pause()

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._pause()

    def state_dict(self) -> dict[str, Any]:
        """Return the seconds of epochs so far, and the summary of windows as if training ended here."""
        running = 0.0 if self._paused else perf_counter() - self._mark
        measured = self._batches and self._seen > self.skip_steps
        last = Window(self._batches, self._units, self._seconds + running, self._waited, None)
        summary = self._window_summary([*self._windows, *([last] if measured else [])])
        seconds = self._epochs.before + self._epochs.seconds + running
        return {"seconds": seconds, "whole": list(self._epochs.whole), "summary": summary}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._restored = state_dict
        self._epochs = EpochStats(state_dict)

    def _close(self, trainer: Trainer) -> dict[str, float | None]:
        """End a window and return its metrics."""
        sync, wait = None, wait_for_ranks(trainer, self._reducer)
        if self._reducer is not None and self._seconds:
            # nan: a resumed run does not know the earlier samples
            sync = math.nan if wait is None else min(1.0, wait / (self._seconds / self._batches))
        self._epochs.waits += [] if wait is None else [wait]
        window = Window(self._batches, self._units, self._seconds, self._waited, sync)
        if self._seen > self.skip_steps:
            self._windows.append(window)
        return self._metrics([window])

    def _metrics(self, windows: list[Window]) -> dict[str, float | None]:
        seconds = sum(window.seconds for window in windows)
        if not seconds:
            return dict.fromkeys((f"{self._unit}_per_s", "step_ms", "data_wait", "grad_sync", "mfu"))
        rate = sum(window.units for window in windows) / seconds  # of this replica
        shares = [window.grad_sync for window in windows if window.grad_sync is not None]
        known = [share for share in shares if not math.isnan(share)]
        flops = self._flops_per_unit if self._peak else None
        return {
            f"{self._unit}_per_s": rate * self._replicas,
            "step_ms": median(1e3 * window.seconds / window.batches for window in windows),
            "data_wait": sum(window.waited for window in windows) / seconds,
            "grad_sync": median(known) if known else math.nan if shares else None,
            "mfu": rate * flops / (self._peak * self._share) if flops and self._peak else None,
        }

    @property
    def newest(self) -> tuple[int, float | None]:
        """Return the number of windows, and samples or tokens per second in the last one."""
        return len(self._windows), self._metrics(self._windows[-1:])[f"{self._unit}_per_s"]

    def result_names(self, task: Any) -> list[str]:
        """Return the names of `summary`, which are added to result.json."""
        return [f"{getattr(task, 'unit', 'samples')}_per_s", *RESULTS]

    def summary(self) -> dict[str, Any]:
        """Return the metrics over the fit, of this rank; None if unknown.

        Medians for `step_ms`, `grad_sync` and the epoch metrics, totals for the others; `slowest_rank` is a name,
        host:rank. A process without a complete window or epoch returns its predecessor's values.
        """
        metrics = self._window_summary(self._windows) | self._epochs.summary()
        return {
            name: None if isinstance(value, float) and math.isnan(value) else value for name, value in metrics.items()
        }

    def _window_summary(self, windows: list[Window]) -> dict[str, float | None]:
        return self._metrics(windows) if windows else self._restored.get("summary") or self._metrics([])


class EpochStats:
    """Seconds of the epochs of a run, and measurements that ranks exchange at their ends."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.before = float(state.get("seconds", 0.0))  # of the current epoch, in earlier processes
        self.whole: list[float] = list(state.get("whole", []))  # seconds of each completed epoch
        self.own: list[tuple[float, float]] = []  # milliseconds of the fastest and the slowest rank, by epoch
        self.slowest: list[str] = []
        self.gpu = self.resident = 0  # peak bytes of a rank
        self._start_epoch()

    def _start_epoch(self) -> None:
        self.seconds, self.batches = 0.0, 0  # of this process
        self.waits: list[float] = []  # seconds that sampled steps waited for other ranks

    def end(self, trainer: Trainer, reducer: DistributedDataParallel | None) -> dict[str, float | None]:
        """Return the metrics of the epoch that ends; empty if it was cut short. A collective."""
        wait = wait_for_ranks(trainer, reducer)
        waits = self.waits or ([] if wait is None else [wait])
        own_ms = 1e3 * max(0.0, self.seconds / self.batches - mean(waits)) if waits and self.batches else math.nan
        device = trainer.strategy.root_device
        gpu = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
        name = f"{platform.node()}:{trainer.global_rank}"
        names, own, resident, gpus = zip(*everyones((name, own_ms, peak_resident(), gpu)), strict=True)
        self.gpu, self.resident = max(self.gpu, *gpus), max(self.resident, *resident)
        if not trainer.fit_loop.epoch_loop.batch_progress.is_last_batch or not self.before + self.seconds:
            return {}
        metrics: dict[str, float | None] = {"epoch_s": self.before + self.seconds}
        self.whole.append(self.before + self.seconds)
        if reducer is not None:
            fastest, slowest = (math.nan, math.nan) if any(map(math.isnan, own)) else (min(own), max(own))
            rank = math.nan if math.isnan(slowest) else own.index(slowest)
            metrics |= {"rank_ms_min": fastest, "rank_ms_max": slowest, "slowest_rank": float(rank)}
            if not math.isnan(slowest):
                self.own.append((fastest, slowest))
                self.slowest.append(names[own.index(slowest)])
        self.before = 0.0
        self._start_epoch()
        return metrics

    def summary(self) -> dict[str, Any]:
        """Return medians over the epochs, a rank's peak memory, and the most often slowest rank, or None."""
        fastest, slowest = zip(*self.own, strict=True) if self.own else ((), ())
        return {
            "epoch_s": median(self.whole) if self.whole else None,
            "peak_gpu_bytes": self.gpu or None,
            "peak_resident_bytes": self.resident or None,
            "rank_ms_min": median(fastest) if fastest else None,
            "rank_ms_max": median(slowest) if slowest else None,
            "slowest_rank": Counter(self.slowest).most_common(1)[0][0] if self.slowest else None,
        }


def _row(metrics: Mapping[str, float | None]) -> dict[str, float]:
    return {f"throughput/{name}": value for name, value in metrics.items() if value is not None}


def _log(trainer: Trainer, metrics: Mapping[str, float | None]) -> None:
    if (row := _row(metrics)) and trainer.is_global_zero:
        for logger in trainer.loggers:
            logger.log_metrics(row, step=trainer.global_step)


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
