"""Profile a training step and an inference batch of a run: parts, operators, modules and memory."""

import json
from contextlib import ExitStack
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from rich.console import Console
from torch import Tensor, nn
from torch.profiler import profile as torch_profile
from torch.utils._pytree import tree_leaves

from lathe.callbacks.profiler import Operator, TorchProfiler, activities, operators_of, table_of
from lathe.config.compression_plan import methods
from lathe.errors import require
from lathe.files import require_writable, whole, write_atomically
from lathe.measure import describe_cpu
from lathe.runs.checkpoints import read_checkpoint, restore
from lathe.runs.inference import open_data
from lathe.runs.rundir import RunDir
from lathe.tasks import LightningTask, Task
from lathe.training.dry_run import DryRun
from lathe.verbs.profile.memory import StepMemory, Timeline, thinned
from lathe.verbs.profile.modules import MARK, marked, module_times
from lathe.verbs.profile.page import page_of
from lathe.verbs.profile.parts import Clock, Parts, medians

ROWS = 40  # operators and modules on the page
FRAMES = ("ProfilerStep", MARK)


def profile(cfg: dict[str, Any]) -> dict[str, Any]:
    """Profile some steps of the run in `paths.run_dir`, and some inference batches; return the report.

    Writes profile.json, profile.html and traces below `profile/` in the run directory, and prints a summary.
    """
    request, run = cfg["request"], RunDir(cfg["paths"]["run_dir"])
    devices = request["trainer"]["devices"]
    require(devices == 1, f"trainer.devices={devices}: one device is looked at; leave it at 1.")
    folder = run.path / "profile"
    folder.mkdir(exist_ok=True)
    require_writable(folder)
    file = run.checkpoint(request["checkpoint"], "checkpoint")
    left_out = list(methods(cfg.get("compression") or {}))
    every = int(cfg["trainer"].get("accumulate_grad_batches", 1))
    warmup, steps = request["warmup"], request["steps"]
    total = warmup + 2 * steps + 2
    cfg = {**cfg, "ckpt_path": None, "find": {"steps": total, "output": str(folder / "of")}}
    cfg["model"] = {**cfg["model"], "pretrained": None}
    trial = DryRun(cfg)
    task = trial.task
    restore(task.net, read_checkpoint(file), str(file))
    compiled, own = bool(cfg["compile"].get("enabled")), isinstance(task, LightningTask)
    parts = Parts(task.net, warmup, steps, divides=not compiled and not own)
    recorder = Recorder(task.net, not compiled, folder, (warmup + steps) * every, every, steps * every)
    memory = StepMemory(total * every, folder)
    trainer = trial.fit(parts, recorder, memory)
    device = trainer.strategy.root_device
    report: dict[str, Any] = {
        "run": str(run.path),
        "checkpoint": request["checkpoint"],
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else describe_cpu()["name"],
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "precision": str(trainer.precision),
        "steps": steps,
        "notes": notes(left_out, compiled, own),
        "training": {
            "parts": parts.medians(),
            "operators": [one._asdict() for one in recorder.operators[:ROWS]],
            "modules": [one._asdict() for one in recorder.modules[:ROWS]],
            "memory": memory.found if device.type == "cuda" or not compiled else {},
            "trace": recorder.file,
        },
        "inference": {} if own else inference(cfg, task, trainer, folder, warmup, steps, compiled),
    }
    write_atomically(folder / "profile.json", json.dumps(report, indent=1) + "\n")
    write_atomically(folder / "profile.html", page_of(report))
    show(report, folder, request["top_k"])
    return report


def notes(left_out: list[str], compiled: bool, own: bool) -> list[str]:
    """Return notes on the limits of the measurements."""
    found = []
    if left_out:
        found.append(f"A step without what compression={','.join(left_out)} does in it, of the net as it is now.")
    if compiled:
        found.append(
            "The net is compiled: its modules, and its forward pass beside the loss, can't be told apart, nor what it "
            "takes of a CPU's memory. compile=none in the run that is looked at tells them."
        )
    if own:
        found.append("A LightningModule as it is says neither what it takes nor what it answers: training alone.")
    return found


class Recorder(TorchProfiler):
    """Record operators, modules (unless compiled) and a trace of the active batches."""

    file = "training.trace.json"
    skippable_steps = None  # type: ignore[assignment]  # needs every step

    def __init__(self, net: nn.Module, told: bool, folder: Path, wait: int, warmup: int, active: int) -> None:
        super().__init__(wait=wait, warmup=warmup, active=active)
        self.net, self.told, self.folder = net, told, folder
        self.operators: list[Operator] = []
        self.modules: list[Any] = []
        self._marks = ExitStack()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._batches = 0

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._batches += 1
        if self.told and self._batches == self.wait + 1:
            self._marks.enter_context(marked(self.net))

    def _write(self, done: torch_profile) -> None:
        assert self._trainer is not None
        self._marks.close()
        device, steps = self._trainer.strategy.root_device.type, self.active // self._trainer.accumulate_grad_batches
        self.operators = operators_of(done, device, steps, FRAMES)
        if self.told:
            self.modules = module_times(done.events(), self.net, device == "cuda", steps)
        self.trace = write_trace(done, self.folder / self.file)


def write_trace(done: torch_profile, path: Path) -> Path:
    """Write the trace for https://ui.perfetto.dev, atomically."""
    with whole(path) as temporary:
        done.export_chrome_trace(str(temporary))
    return path


def inference(
    cfg: dict[str, Any], task: Task, trainer: Trainer, folder: Path, warmup: int, steps: int, compiled: bool
) -> dict[str, Any]:
    """Profile validation batches through the net in eval mode, in the run's precision."""
    device, net = trainer.strategy.root_device, task.net
    net.to(device).eval()
    batches = chain.from_iterable(repeat(open_data(cfg, task).eval_loader("val", device)))

    def fetched() -> Any:
        return next(batches)[0]

    def forward(x: Any) -> None:
        with trainer.precision_plugin.forward_context():
            net(x)

    with torch.inference_mode():
        found, clock = [], Clock(device)
        for _ in range(warmup + steps):
            clock.take()
            x = fetched()
            waited = clock.take()
            forward(x)
            found.append({"data": waited, "forward": clock.take()})
        kept = [fetched() for _ in range(steps)]
        with ExitStack() as marks:
            if not compiled:
                marks.enter_context(marked(net))
            with torch_profile(activities=activities(device.type), acc_events=True) as done:
                for x in kept:
                    forward(x)
        memory: dict[str, Any] = {}
        if device.type == "cuda" or not compiled:
            given = [leaf for leaf in tree_leaves(kept[0]) if isinstance(leaf, Tensor)]
            timeline = Timeline(device, [*net.parameters(), *net.buffers(), *given])
            timeline.reset()
            with timeline:
                forward(kept[0])
            memory = {"peak": timeline.peak, "at": timeline.at}
            if timeline.points:
                memory["timeline"] = thinned(timeline.points)
    name = "inference.trace.json"
    write_trace(done, folder / name)
    modules = [] if compiled else module_times(done.events(), net, device.type == "cuda", steps)
    leaf = next(leaf for leaf in tree_leaves(kept[0]) if isinstance(leaf, Tensor))
    return {
        "batch": len(leaf),
        "parts": medians(found[warmup:]),
        "operators": [one._asdict() for one in operators_of(done, device.type, steps, FRAMES)[:ROWS]],
        "modules": [one._asdict() for one in modules[:ROWS]],
        "memory": memory,
        "trace": name,
    }


def show(report: dict[str, Any], folder: Path, top_k: int) -> None:
    """Print the parts and the most expensive operators."""
    console = Console()
    for name, part in (("a training step", report["training"]), ("an inference batch", report["inference"])):
        if not part:
            continue
        operators = [Operator(**row) for row in part["operators"][:top_k]]
        times = dict(part["parts"])
        step = times.pop("step")
        shares = ", ".join(f"{key} {time:.3f} ms ({time / step:.0%})" for key, time in times.items())
        console.print(
            f"{name}: {step:.3f} ms, the median of {report['steps']}: {shares}", soft_wrap=True, highlight=False
        )
        console.print(table_of(f"operators of {name}, each without those that it calls", operators))
        if part["memory"]:
            console.print(f"peak memory of {name}: {part['memory']['peak'] / 2**20:.1f} MiB")
    for note in report["notes"]:
        console.print(note, soft_wrap=True, highlight=False, markup=False)
    line = f"{folder / 'profile.html'} has more; traces beside it open at https://ui.perfetto.dev"
    console.print(line, soft_wrap=True, highlight=False, markup=False)
