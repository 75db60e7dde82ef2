"""What a compiled case costs at the start and gains afterwards, in a process of its own."""

import os
import time
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer

from lathe.benchmark.fits import Clock, fit
from lathe.measure.resident import peak_resident, reset_peak


def measure(case: dict[str, Any]) -> dict[str, Any]:
    """Seconds that the first `warmup` steps took beyond their time, milliseconds of a step, memory at the peak of the
    steps after them, and how often the compiler gave a graph up or made another one.

    Code goes into the folder `case["cache"]`, and comes from there. The memory is torch's on a GPU; on a CPU it is the
    process's, libraries and all.
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
    """How many the compiler has made in this process."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


class _FirstSteps(Clock):
    """Also the moments at which the fit's first step begins and its warm-up ends."""

    skippable_steps = None  # every step is needed

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
