"""Where the time of a training step goes, operator by operator."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import rich
from lightning.pytorch import Callback, LightningModule, Trainer
from rich.table import Table
from torch.profiler import ProfilerActivity, profile, schedule

from lathe.callbacks.skippable_hooks import SkippableHooks
from lathe.config.types import Count, Name, NonNegativeInt
from lathe.config.validation import validated
from lathe.errors import UserError


class Operator(NamedTuple):
    """What an operator took by itself, without the operators that it calls; `share` is of all operators."""

    name: str
    calls: float  # a step
    ms: float  # a step
    share: float


def activities(device_type: str) -> list[ProfilerActivity]:
    """What is recorded on devices of this type."""
    return [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device_type == "cuda" else [])]


def operators_of(
    done: profile, device_type: str, steps: int, frames: tuple[str, ...] = ("ProfilerStep",)
) -> list[Operator]:
    """Every operator of `steps` recorded steps, the costliest first; on a GPU by the device's time. What begins with
    `frames`, as the profiler's own frame around a step does, is none."""
    times = [
        (event.self_device_time_total if device_type == "cuda" else event.self_cpu_time_total, event)
        for event in done.key_averages()
        if not event.key.startswith(frames)
    ]
    total = sum(time for time, _ in times) or 1.0
    return [
        Operator(event.key, event.count / steps, time / 1e3 / steps, time / total)
        for time, event in sorted(times, key=lambda pair: -pair[0])
    ]


def table_of(title: str, operators: Sequence[Operator]) -> Table:
    """These operators as a table for the screen."""
    table = Table(title=title, title_justify="left")
    for column, side in (("operator", "left"), ("calls/step", "right"), ("ms/step", "right"), ("share", "right")):
        table.add_column(column, justify=side)  # type: ignore[arg-type]
    for one in operators:
        table.add_row(one.name, f"{one.calls:g}", f"{one.ms:.3f}", f"{one.share:.1%}")
    return table


class TorchProfiler(SkippableHooks, Callback):
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

    @validated
    def __init__(
        self,
        dirpath: Name | None = None,
        wait: NonNegativeInt = 5,
        warmup: Count = 3,
        active: Count = 10,
        top_k: Count = 12,
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
        self._profile = profile(
            activities=activities(trainer.strategy.root_device.type),
            schedule=schedule(wait=self.wait, warmup=self.warmup, active=self.active, repeat=1),
            on_trace_ready=self._write,
            record_shapes=self.record_shapes,
            profile_memory=self.profile_memory,
            with_stack=self.with_stack,
            acc_events=True,  # of one cycle: else torch 2.11 warns of events of cycles before, of which there are none
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
        device, steps = self._trainer.strategy.root_device.type, self.active
        title = f"{'GPU' if device == 'cuda' else 'CPU'} self time of {steps} training steps"
        self._table = table_of(title, operators_of(done, device, steps)[: self.top_k])
