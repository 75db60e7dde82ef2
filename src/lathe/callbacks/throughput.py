"""How fast training is, and what it waits for."""

from statistics import median
from time import perf_counter
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from lathe.errors import UserError
from lathe.measure.flops import count_flops, net_input, peak_flops

_DTYPES = {"16": torch.float16, "bf16": torch.bfloat16, "32": torch.float32}


class Throughput(Callback):
    """Log `throughput/*` once per window of training steps, measured on process 0.

    - `samples_per_s`: of all data-parallel processes together, each taken to have a batch as large as this one's.
    - `step_ms`: wall-clock milliseconds per batch, the mean of the window.
    - `data_wait`: share of the time between asking the loader for a batch and handing it to the step, transfer and augmentation
      included. On a GPU it is the host's share: the device may be busy with earlier steps meanwhile.
    - `grad_sync`: share of the time that backward waits for the gradients of other processes after its own computation has ended,
      from the timers of DDP's reducer (events on a GPU) in one sampled step per window. Communication hidden behind backward does
      not count, waiting for a slower process does. Left out where there is no such timer: one process, or not DDP.
    - `mfu`: model FLOP/s, three times forward's (PaLM, arXiv:2204.02311, appendix B), over the devices' peak. Left out where the
      peak is not known.

    Validation, saving a checkpoint and the seam between epochs are not in the time, nor are the first steps. A GPU is waited for
    at the edges of a window and of such a pause, nowhere else.

    Args:
        window: batches per measurement; None follows `trainer.log_every_n_steps`.
        skip_steps: batches at the start of each fit that are not measured: compilation, autotuning, caches.
        peak_flops: FLOP/s of one device; None looks the GPU's name up in `lathe.measure.flops`.
    """

    def __init__(self, window: int | None = None, skip_steps: int = 10, peak_flops: float | None = None) -> None:
        if window is not None and window < 1:
            raise UserError(f"callbacks.throughput.window={window} is below 1: use null for one window per logged step.")
        if skip_steps < 1:
            raise UserError(f"callbacks.throughput.skip_steps={skip_steps} is below 1: the first step always warms something up.")
        if peak_flops is not None and peak_flops <= 0:
            raise UserError(f"callbacks.throughput.peak_flops={peak_flops} is not positive: use null to look it up.")
        self.window, self.skip_steps, self.peak_flops = window, skip_steps, peak_flops
        self._clear()

    def _clear(self) -> None:
        self._on = False
        self._size = 0
        self._todo = 0  # batches left in the window, or in the warm-up
        self._warm = False
        self._paused = True  # the time since `_mark` is not training time
        self._mark = self._asked = self._begun = 0.0
        self._seconds = self._waited = 0.0
        self._samples = 0
        self._flops_per_sample: float | None = None
        self._windows: list[tuple[int, int, float, float, float | None]] = []  # batches, samples, seconds, waited, grad_sync

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._clear()
        if not trainer.is_global_zero:
            return
        self._on = True
        self._cuda = trainer.strategy.root_device.type == "cuda"
        sampler: dict[str, Any] = getattr(trainer.strategy, "distributed_sampler_kwargs", None) or {}
        self._replicas = int(sampler.get("num_replicas", 1))
        self._size = self.window or trainer.log_every_n_steps or 50  # type: ignore[attr-defined]
        self._todo = self.skip_steps
        self._reducer = trainer.strategy.model if isinstance(trainer.strategy.model, DistributedDataParallel) else None
        if self._reducer is not None:
            self._reducer._set_ddp_runtime_logging_sample_rate(self._size)
        self._peak = self.peak_flops or peak_flops(trainer.strategy.root_device, _compute_dtype(trainer))
        # Lightning has no public hook before the loader is asked; this one is looked up on the loop at the start of each epoch.
        loop, ask = trainer.fit_loop.epoch_loop, type(trainer.fit_loop.epoch_loop)._on_before_fetch

        def on_before_fetch() -> None:
            self._asked = perf_counter()
            ask(loop)

        loop._on_before_fetch = on_before_fetch  # type: ignore[method-assign]

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._on:
            self._pause()
            if self._warm and self._size > self._todo:
                self._close()
            vars(trainer.fit_loop.epoch_loop).pop("_on_before_fetch", None)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._on:
            if self._peak and self._flops_per_sample is None:
                self._flops_per_sample = 3.0 * count_flops(pl_module.get_submodule("net"), net_input(batch)[:1])
            now = perf_counter()
            # The last batch of an epoch has been fetched ahead: nobody asked for it.
            self._begun = self._asked or now
            self._waited += now - self._begun
            self._asked = 0.0

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        if not self._on:
            return
        self._samples += (
            len(batch[0]) if isinstance(batch, list | tuple) and isinstance(batch[0], Tensor) else len(net_input(batch))
        )
        self._todo -= 1
        if self._todo == 0 and self._cuda:
            torch.cuda.synchronize()
        now = perf_counter()
        self._seconds += now - (self._begun if self._paused else self._mark)
        self._paused = False
        self._mark = now
        if self._todo == 0:
            if self._warm:
                figures = {f"throughput/{name}": value for name, value in self._close().items() if value is not None}
                for logger in trainer.loggers:
                    logger.log_metrics(figures, step=trainer.global_step)
            self._warm, self._todo = True, self._size
            self._seconds = self._waited = 0.0
            self._samples = 0
            # What was spent here is nobody's training time.
            self._mark = perf_counter()

    def _pause(self) -> None:
        if self._on and not self._paused:
            if self._cuda:
                torch.cuda.synchronize()
            self._seconds += perf_counter() - self._mark
            self._paused = True

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._pause()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._pause()

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._pause()

    def _close(self) -> dict[str, float | None]:
        batches = self._size - self._todo
        sync = None
        if self._reducer is not None and self._seconds:
            data = self._reducer._get_ddp_logging_data()
            nanoseconds = data.get("backward_comm_time", 0) - data.get("backward_compute_comm_overlap_time", 0)
            # All zeros: this build or device has no timer.
            if data.get("backward_comm_time", 0) > 0:
                sync = min(1.0, max(0.0, nanoseconds * 1e-9 / (self._seconds / batches)))
        self._windows.append((batches, self._samples, self._seconds, self._waited, sync))
        return self._figures(self._windows[-1:])

    def _figures(self, windows: list[tuple[int, int, float, float, float | None]]) -> dict[str, float | None]:
        batches, samples, seconds = sum(w[0] for w in windows), sum(w[1] for w in windows), sum(w[2] for w in windows)
        if not batches or not seconds:
            return dict.fromkeys(("samples_per_s", "step_ms", "data_wait", "grad_sync", "mfu"))
        rate = samples / seconds  # of this process
        shares = [w[4] for w in windows if w[4] is not None]
        return {
            "samples_per_s": rate * self._replicas,
            "step_ms": median(1e3 * w[2] / w[0] for w in windows),
            "data_wait": sum(w[3] for w in windows) / seconds,
            "grad_sync": median(shares) if shares else None,
            "mfu": rate * self._flops_per_sample / self._peak if self._peak and self._flops_per_sample else None,
        }

    def summary(self) -> dict[str, float | None]:
        """The same five figures over the whole fit: medians of windows for `step_ms` and `grad_sync`, totals for the others.

        None where there is nothing to tell: on other processes, in a run no longer than `skip_steps`, for an unknown peak.
        """
        return self._figures(self._windows)


def _compute_dtype(trainer: Trainer) -> torch.dtype:
    # "transformer-engine" and "64-true" have no column in the table of peaks.
    return _DTYPES.get(str(trainer.precision).split("-")[0], torch.float64)
