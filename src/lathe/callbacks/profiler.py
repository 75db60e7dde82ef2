"""Where the time of a training step goes, operator by operator."""

from pathlib import Path
from typing import Any

import rich
from lightning.pytorch import Callback, LightningModule, Trainer
from rich.table import Table
from torch.profiler import ProfilerActivity, profile, schedule

from lathe.callbacks.lean import EachStep
from lathe.config.schema.held import held
from lathe.errors import UserError


@held("lathe.callbacks.TorchProfiler")
class TorchProfiler(EachStep, Callback):
    """Record some training steps with torch.profiler, write a trace per process, and print the costliest operators.

    The trace is `<dirpath>/rank<r>.<step>.pt.trace.json`, a Chrome trace: drop it on https://ui.perfetto.dev, or point
    TensorBoard with torch-tb-profiler at the folder. Time is self time, without that of the operators called inside; on
    a GPU it is the device's time.

    Args:
        dirpath: folder of the traces, made if missing; None is profile/ in the run directory.
        wait: batches before anything happens, so that compilation and caches are out of the picture.
        warmup: batches profiled and thrown away: the profiler's own start-up.
        active: batches recorded.
        top_k: rows of the printed table.
        record_shapes: shapes of the operators' inputs, in the trace.
        profile_memory: allocations, in the trace; slower.
        with_stack: Python stacks, in the trace; much slower and larger.

    Raises UserError at the end of a fit that was too short to record anything, and for counts out of range.
    """

    def __init__(
        self,
        dirpath: str | None = None,
        wait: int = 5,
        warmup: int = 3,
        active: int = 10,
        top_k: int = 12,
        record_shapes: bool = False,
        profile_memory: bool = False,
        with_stack: bool = False,
    ) -> None:
        self.dirpath, self.top_k = Path(dirpath) if dirpath else None, top_k
        self.wait, self.warmup, self.active = wait, warmup, active
        self.record_shapes, self.profile_memory, self.with_stack = record_shapes, profile_memory, with_stack
        self._profile: profile | None = None
        self._trainer: Trainer | None = None
        self.trace: Path | None = None  # this process's file, once written
        self._table: Table | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._trainer, self.trace, self._table = trainer, None, None
        activities = [ProfilerActivity.CPU]
        if trainer.strategy.root_device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(
            activities=activities,
            schedule=schedule(wait=self.wait, warmup=self.warmup, active=self.active, repeat=1),
            on_trace_ready=self._write,
            record_shapes=self.record_shapes,
            profile_memory=self.profile_memory,
            with_stack=self.with_stack,
        )
        self._profile.start()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._profile is not None and self.trace is None:
            self._profile.step()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._stop()
        if self.trace is None:
            raise UserError(
                f"callbacks.profiler recorded nothing: the run had {trainer.global_step} steps and recording begins "
                f"after callbacks.profiler.wait={self.wait} plus callbacks.profiler.warmup={self.warmup}; lower them "
                "or train longer."
            )
        if trainer.is_global_zero and self._table is not None:
            rich.print(self._table)
            rich.print(f"Trace: {self.trace} (open it at https://ui.perfetto.dev)")

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._stop()

    def _stop(self) -> None:
        if self._profile is not None:
            self._profile.stop()
            self._profile = self._trainer = None

    def _write(self, done: profile) -> None:
        assert self._trainer is not None
        folder = self.dirpath or Path(self._trainer.default_root_dir) / "profile"
        folder.mkdir(parents=True, exist_ok=True)
        trace = folder / f"rank{self._trainer.global_rank}.{self._trainer.global_step}.pt.trace.json"
        done.export_chrome_trace(str(trace))
        self.trace = trace
        on_gpu = self._trainer.strategy.root_device.type == "cuda"
        averages = done.key_averages()
        times = [(e.self_device_time_total if on_gpu else e.self_cpu_time_total, e) for e in averages]
        # The profiler's own frame around a step is not an operator.
        times = [(t, e) for t, e in times if not e.key.startswith("ProfilerStep")]
        total = sum(t for t, _ in times) or 1.0
        steps = self.active
        self._table = Table(
            title=f"{'GPU' if on_gpu else 'CPU'} self time of {steps} training steps", title_justify="left"
        )
        for column, side in (("operator", "left"), ("calls/step", "right"), ("ms/step", "right"), ("share", "right")):
            self._table.add_column(column, justify=side)  # type: ignore[arg-type]
        for t, event in sorted(times, key=lambda x: -x[0])[: self.top_k]:
            self._table.add_row(event.key, f"{event.count / steps:g}", f"{t / 1e3 / steps:.3f}", f"{t / total:.1%}")
