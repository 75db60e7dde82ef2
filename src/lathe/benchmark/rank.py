"""The work of each rank: waits for a turn, builds a case's Trainer as in training, and measures steps."""

import json
import os
import statistics
import time
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback

from lathe.benchmark import compiling, short
from lathe.benchmark.fits import Clock, fit
from lathe.callbacks import Throughput
from lathe.data.transfer import train_batches
from lathe.files import write_atomically
from lathe.launch.error_reporting import explain_error
from lathe.measure import PeakMemory, SavedActivations, count_state
from lathe.measure.processes import everyones
from lathe.runs import inference
from lathe.training.trainer_setup import configure_logging, device_type

LOOK = 0.002  # seconds between polls for a turn


def work(cfg: Mapping[str, Any]) -> None:
    """Measure the case named in each file `go-<n>`, in order, until one is empty. Rank 0 writes `done-<n>`."""
    configure_logging()
    plan = cfg["benchmark"]
    folder = Path(plan["folder"])
    for turn in count():
        call = folder / f"go-{turn}"
        while not call.exists():  # no collective, which would time out
            time.sleep(LOOK)
        name = call.read_text()
        if not name:
            return
        try:
            result = measure(plan["cases"][name])
        except Exception as error:
            explained = explain_error(error)
            if explained is None:
                raise
            result = {"error": str(explained)}
        if int(os.environ.get("RANK", "0")) == 0:
            write_atomically(folder / f"done-{turn}", json.dumps(result))


def measure(case: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of one turn.

    `case` has `cfg` (resolved), `kind`, `sync`, `alone`, `warmup` and `steps`. `peak` and `epochs` are measured once,
    and removed from it.
    """
    if case["kind"] == "compile":
        return compiling.measure(case)
    if case["kind"] == "memory":
        return _memory(case)
    found = _time(case)
    if case.pop("peak", False):
        found["peak"] = short.peak(case["cfg"])
    if epochs := case.pop("epochs", 0):
        found |= short.train(case["cfg"], epochs)
    return found


def _time(case: dict[str, Any]) -> dict[str, Any]:
    cfg = case["cfg"]
    clock = Clock(case["warmup"], case["steps"], case["sync"])
    throughput = Throughput(window=case["steps"], skip_steps=case["warmup"] + 1)
    trainer, parameters = fit(cfg, [clock, throughput])
    cuda = trainer.strategy.root_device.type == "cuda"
    milliseconds = clock.step_ms(cuda)
    told = throughput.summary()
    result = {
        "step_ms": milliseconds,
        "mean_step_ms": _mean_ms(clock.ends if cuda else clock.cpu),
        "fastest_step_ms": clock.fastest_ms(),
        "samples_per_s": cfg["data"]["batch_size"] / milliseconds * 1e3 if cfg["data"].get("batch_size") else None,
        "epoch_s": trainer.num_training_batches * milliseconds / 1e3,
        "grad_sync": told["grad_sync"] if case["sync"] else None,
        "mfu": told["mfu"],
        "parameters": parameters,
    }
    if case["forward"]:
        result["forward_ms"] = _forward_ms(trainer, cfg, case["steps"])
    if cuda and case["alone"]:
        result["peak"] = torch.cuda.max_memory_allocated()
    return result


def _mean_ms(ends: list[float]) -> float:
    return (ends[-1] - ends[0]) / (len(ends) - 1) * 1e3


def _forward_ms(trainer: Trainer, cfg: dict[str, Any], passes: int) -> float:
    """Return the median time of the net's forward pass in eval mode without gradients: the cost of a teacher."""
    net = trainer.lightning_module.get_submodule("net").eval()
    data = inference.open_data(cfg, trainer.lightning_module)
    x = next(iter(train_batches(data, trainer.strategy.root_device)))[0]
    clock, taken = time.perf_counter if x.is_cuda else time.process_time, []
    with torch.no_grad():
        for _ in range(passes):
            began = clock()
            net(x)
            if x.is_cuda:
                torch.cuda.synchronize()
            taken.append(clock() - began)
    return statistics.median(taken) * 1e3


class _Probe(Callback):
    """Counts memory in the last step of a fit, when the optimizer has its state."""

    skippable_steps = None  # needs every step

    def __init__(self, step: int, memory: PeakMemory) -> None:
        self.step, self.memory, self.found = step, memory, dict[str, int]()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.step - 1:
            self.saved = SavedActivations(
                pl_module.get_submodule("net"), [t for t in batch if isinstance(t, torch.Tensor)]
            )
            self.memory.reset()
            self.saved.__enter__()

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        if trainer.global_step == self.step - 1:
            state = count_state(pl_module.get_submodule("net"), trainer.strategy.optimizers)
            self.found = {"parameters": state.parameters, "gradients": state.gradients, "optimizer": state.optimizer}

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == self.step:
            self.saved.__exit__(None, None, None)
            self.found |= {"activations": self.saved.peak, "peak": self.memory.peak}


def _memory(case: dict[str, Any]) -> dict[str, Any]:
    cfg = case["cfg"]
    device = torch.device(device_type(cfg["trainer"]["accelerator"]))
    with PeakMemory(device) as memory:  # from before the net is made, so that it counts everything
        probe = _Probe(case["steps"], memory)
        fit(cfg, [probe])
    everyone = everyones(probe.found)
    fullest = max(everyone, key=lambda found: found["parameters"] + found["optimizer"])
    return {**fullest, "peak": max(found["peak"] for found in everyone), "ranks": everyone}
