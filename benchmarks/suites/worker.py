"""The work of each rank of a launch: it waits for a turn, trains a case for some steps, and measures them."""

import json
import math
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import Callback
from torch.nn.parallel import DistributedDataParallel

from lathe.callbacks import Throughput, skip_empty_hooks
from lathe.callbacks.module_access import task_of
from lathe.data.transfer import train_batches
from lathe.files import write_atomically
from lathe.launch.error_reporting import explain_error
from lathe.measure import PeakMemory, SavedActivations, count_parameters, count_state
from lathe.measure.processes import everyones, peak_resident, reset_peak
from lathe.runs import inference
from lathe.runs.build import make_data, make_task
from lathe.training.trainer_setup import configure_logging, device_type, make_methods, make_trainer, prepare_model
from suites.runner import POLL


def work(cfg: Mapping[str, Any]) -> None:
    """Measure the case named in each file `go-<n>`, in order. Rank 0 writes `done-<n>`."""
    configure_logging()
    folder, jobs = Path(cfg["benchmark"]["folder"]), cfg["benchmark"]["jobs"]
    for turn in count():
        call = folder / f"go-{turn}"
        while not call.exists():  # no collective, which would time out
            time.sleep(POLL)
        try:
            result = measure(jobs[call.read_text()])
        except Exception as error:
            explained = explain_error(error)
            if explained is None:
                raise
            result = {"error": str(explained)}
        if int(os.environ.get("RANK", "0")) == 0:
            write_atomically(folder / f"done-{turn}", json.dumps(result))


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of one turn.

    `job` has `cfg` (resolved), `kind`, `sync`, `fresh`, `forward`, `warmup` and `steps`. `peak` and `epochs` are
    measured once, and removed from it.
    """
    if job["kind"] == "compile":
        return _measure_compiled(job)
    if job["kind"] == "memory":
        return _measure_memory(job)
    figures = _measure_time(job)
    if job.pop("peak", False):
        figures["peak"] = _measure_peak(job["cfg"])
    if epochs := job.pop("epochs", 0):
        figures |= _train(job["cfg"], epochs)
    return figures


def fit(cfg: dict[str, Any], callbacks: list[Callback]) -> tuple[Trainer, int]:
    """Train with this configuration as a run does; return the Trainer and the number of parameters."""
    seed_everything(cfg["seed"], workers=True, verbose=False)
    datamodule, task = make_data(cfg), make_task(cfg)
    parameters = count_parameters(task.net).total
    callbacks = [*make_methods(cfg), *callbacks]
    skip_empty_hooks(callbacks)
    trainer = make_trainer(cfg, Path(cfg["paths"]["run_dir"]), callbacks)
    prepare_model(cfg, task, trainer)
    trainer.fit(task.driven, datamodule=datamodule)
    return trainer, parameters


class Clock(Callback):
    """Takes the times at which steps end, synchronised with a GPU before the first and after the last."""

    skippable_steps = None  # needs every step

    def __init__(self, warmup: int, steps: int, sync: bool = True) -> None:
        self.warmup, self.steps, self.sync = warmup, steps, sync
        self.ends: list[float] = []
        self.cpu: list[float] = []  # of this process: other load on the machine does not affect it

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self.sync:
            assert isinstance(trainer.strategy.model, DistributedDataParallel)
            trainer.strategy.model.require_backward_grad_sync = False  # as no_sync() does

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step > self.warmup:
            first, last = not self.ends, len(self.ends) == self.steps
            if trainer.strategy.root_device.type == "cuda" and (first or last):
                torch.cuda.synchronize()
                if first:
                    torch.cuda.reset_peak_memory_stats()
            self.ends.append(time.perf_counter())
            self.cpu.append(time.process_time())

    def step_ms(self, cuda: bool) -> float:
        """Return the median on a CPU, without the break between epochs; the mean on a GPU, whose steps overlap."""
        if cuda:
            return _mean_ms(self.ends)
        return statistics.median(after - before for before, after in pairwise(self.ends)) * 1e3


def _mean_ms(ends: Sequence[float]) -> float:
    return (ends[-1] - ends[0]) / (len(ends) - 1) * 1e3


def _common_figures(trainer: Trainer, cfg: dict[str, Any], clock: Clock, parameters: int) -> dict[str, Any]:
    milliseconds = clock.step_ms(trainer.strategy.root_device.type == "cuda")
    batch = cfg["data"].get("batch_size")
    return {
        "step_ms": milliseconds,
        "samples_per_s": batch / milliseconds * 1e3 if batch else None,
        "epoch_s": trainer.num_training_batches * milliseconds / 1e3,
        "parameters": parameters,
    }


def _measure_time(job: dict[str, Any]) -> dict[str, Any]:
    cfg = job["cfg"]
    clock = Clock(job["warmup"], job["steps"], job["sync"])
    throughput = Throughput(window=job["steps"], skip_steps=job["warmup"] + 1)
    trainer, parameters = fit(cfg, [clock, throughput])
    cuda, summary = trainer.strategy.root_device.type == "cuda", throughput.summary()
    figures = {
        **_common_figures(trainer, cfg, clock, parameters),
        "mean_step_ms": _mean_ms(clock.ends if cuda else clock.cpu),
        "grad_sync": summary["grad_sync"] if job["sync"] else None,
        "mfu": summary["mfu"],
    }
    if job["forward"]:
        figures["forward_ms"] = _forward_ms(trainer, cfg, job["steps"])
    if cuda and job["fresh"]:
        figures["peak"] = torch.cuda.max_memory_allocated()
    return figures


def _forward_ms(trainer: Trainer, cfg: dict[str, Any], passes: int) -> float:
    """Return the median time of the net's forward pass in eval mode without gradients: the cost of a teacher."""
    net = trainer.lightning_module.get_submodule("net").eval()
    data = inference.open_data(cfg, trainer.lightning_module)
    x = next(iter(train_batches(data, trainer.strategy.root_device)))[0]
    clock, seconds = time.perf_counter if x.is_cuda else time.process_time, []
    with torch.no_grad():
        for _ in range(passes):
            began = clock()
            net(x)
            if x.is_cuda:
                torch.cuda.synchronize()
            seconds.append(clock() - began)
    return statistics.median(seconds) * 1e3


class _CompileClock(Clock):
    """A clock that also takes the time from the start to the end of the warm-up."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.began = time.perf_counter()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == self.warmup:
            if trainer.strategy.root_device.type == "cuda":
                torch.cuda.synchronize()
            self.start_s, self.graphs = time.perf_counter() - self.began, _count_graphs()
            reset_peak()
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)


def _count_graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def _measure_compiled(job: dict[str, Any]) -> dict[str, Any]:
    """Measure compile time, step time, peak memory, graph breaks and recompilations.

    `compile_s` is the time of the first `warmup` steps beyond their usual time. `job["cache"]` is the compile cache.
    The peak is of the steps after them: torch's on a GPU, the whole process's on a CPU.
    """
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = job["cache"]
    clock = _CompileClock(job["warmup"], job["steps"])
    trainer, parameters = fit(job["cfg"], [clock])
    figures = _common_figures(trainer, job["cfg"], clock, parameters)
    cuda = trainer.strategy.root_device.type == "cuda"
    return {
        **figures,
        "compile_s": max(0.0, clock.start_s - job["warmup"] * figures["step_ms"] / 1e3),
        "peak": torch.cuda.max_memory_allocated() if cuda else peak_resident(),
        "breaks": sum(torch._dynamo.utils.counters["graph_break"].values()),
        "anew": _count_graphs() - clock.graphs,
    }


class _MemoryProbe(Callback):
    """Counts memory in the last step of a fit, when the optimizer has its state."""

    skippable_steps = None  # needs every step

    def __init__(self, step: int, memory: PeakMemory) -> None:
        self.step, self.memory, self.figures = step, memory, dict[str, int]()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.step - 1:
            inputs = [value for value in batch if isinstance(value, torch.Tensor)]
            self.saved = SavedActivations(pl_module.get_submodule("net"), inputs)
            self.memory.reset()
            self.saved.__enter__()

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        if trainer.global_step == self.step - 1:
            state = count_state(pl_module.get_submodule("net"), trainer.strategy.optimizers)
            self.figures = asdict(state)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == self.step:
            self.saved.__exit__(None, None, None)
            self.figures |= {"activations": self.saved.peak, "peak": self.memory.peak}


def _measure_memory(job: dict[str, Any]) -> dict[str, Any]:
    device = torch.device(device_type(job["cfg"]["trainer"]["accelerator"]))
    with PeakMemory(device) as memory:  # from before the net is made, so that it counts everything
        probe = _MemoryProbe(job["steps"], memory)
        fit(job["cfg"], [probe])
    ranks = everyones(probe.figures)
    fullest = max(ranks, key=lambda figures: figures["parameters"] + figures["optimizer"])
    return {**fullest, "peak": max(figures["peak"] for figures in ranks), "ranks": ranks}


def _measure_peak(cfg: dict[str, Any]) -> int | None:
    """Return the largest process's peak bytes of tensors in a fit; None for compiled code on a CPU."""
    device = torch.device(device_type(cfg["trainer"]["accelerator"]))
    if cfg["compile"]["enabled"] and device.type != "cuda":
        return None
    with PeakMemory(device) as memory:  # from before the net is made, so that it counts everything
        memory.reset()
        before = memory.bytes
        fit({**cfg, "trainer": {**cfg["trainer"], "max_steps": 2}}, [])  # the second has the optimizer's state
        own = memory.peak - before
    return max(everyones(own))


def _train(cfg: dict[str, Any], epochs: int) -> dict[str, Any]:
    """Train; return the validation metric after `epochs` (None if not finite)."""
    limits = {"max_steps": -1, "max_epochs": epochs, "limit_val_batches": 1.0, "check_val_every_n_epoch": epochs}
    trainer, _ = fit({**cfg, "trainer": {**cfg["trainer"], **limits}}, [])
    name = task_of(trainer.lightning_module).monitor
    value = trainer.callback_metrics.get(name)
    return {"metric": name, "reached": None if value is None or not math.isfinite(value) else float(value)}
