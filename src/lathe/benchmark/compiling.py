"""Measures the compile time and the gain of a compiled case, in a separate process."""

import os
import time
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer

from lathe.benchmark.fits import Clock, fit
from lathe.measure.resident import peak_resident, reset_peak


def measure(case: dict[str, Any]) -> dict[str, Any]:
    """Measure compile time, step time, peak memory, graph breaks and recompilations.

    `compile_s` is the time of the first `warmup` steps beyond their usual time. `case["cache"]` is the compile cache.
    The peak is of the steps after them: torch's on a GPU, the whole process's on a CPU.
    """
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = case["cache"]
    clock = _FirstSteps(case["warmup"], case["steps"], sync=True)
    trainer, parameters = fit(case["cfg"], [clock])
    cuda = trainer.strategy.root_device.type == "cuda"
    milliseconds = clock.step_ms(cuda)
    batch = case["cfg"]["data"].get("batch_size")
    return {
        "compile_s": max(0.0, clock.first - clock.began - case["warmup"] * milliseconds / 1e3),
        "step_ms": milliseconds,
        "samples_per_s": batch / milliseconds * 1e3 if batch else None,
        "epoch_s": trainer.num_training_batches * milliseconds / 1e3,
        "peak": torch.cuda.max_memory_allocated() if cuda else peak_resident(),
        "breaks": sum(torch._dynamo.utils.counters["graph_break"].values()),
        "anew": graphs() - clock.graphs,
        "parameters": parameters,
    }


def graphs() -> int:
    """Return the number of graphs compiled in this process."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


class _FirstSteps(Clock):
    """A clock that also takes the time at which the first step begins and the warm-up ends."""

    skippable_steps = None  # needs every step

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self.began = time.perf_counter()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == self.warmup:
            if trainer.strategy.root_device.type == "cuda":
                torch.cuda.synchronize()
            self.first, self.graphs = time.perf_counter(), graphs()
            reset_peak()
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
