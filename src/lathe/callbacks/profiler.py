"""Profile training steps by operator."""

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
    """Time of an operator, without its callees; `share` is of all operators."""

    name: str
    calls: float  # per step
    ms: float  # per step
    share: float


def activities(device_type: str) -> list[ProfilerActivity]:
    return [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device_type == "cuda" else [])]


def operators_of(
    done: profile, device_type: str, steps: int, frames: tuple[str, ...] = ("ProfilerStep",)
) -> list[Operator]:
    """Return the operators of `steps` recorded steps, the slowest first; on a GPU by the device's time.

    Events whose names begin with `frames`, such as the profiler's own around a step, are left out.
    """
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
    table = Table(title=title, title_justify="left")
    for column, side in (("operator", "left"), ("calls/step", "right"), ("ms/step", "right"), ("share", "right")):
        table.add_column(column, justify=side)  # type: ignore[arg-type]
    for operator in operators:
        table.add_row(operator.name, f"{operator.calls:g}", f"{operator.ms:.3f}", f"{operator.share:.1%}")
    return table


class TorchProfiler(SkippableHooks, Callback):
    """Profile some training steps with torch.profiler, and print the slowest operators.

    Each rank writes `<dirpath>/rank<r>.<step>.pt.trace.json`, a Chrome trace for https://ui.perfetto.dev or TensorBoard
    with torch-tb-profiler. Time is self time, without callees; on a GPU it is the device's.

    Args:
        dirpath: folder of the traces; None is profile/ in the run directory.
        wait, warmup, active: batches before profiling (compilation, cold caches), discarded, and recorded.
        top_k: rows of the printed table.
        record_shapes, profile_memory, with_stack: more in the trace: input shapes, allocations (slower), stacks (slow,
            large).
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
        self.trace: Path | None = None  # this rank's file, once written
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
            acc_events=True,  # otherwise torch 2.11 warns of events of earlier cycles
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
