"""Profile a training step and an inference batch of a run: parts, operators, modules and memory."""

import json
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from itertools import chain, repeat
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from rich.console import Console
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.profiler import profile as torch_profile
from torch.profiler import record_function
from torch.utils._pytree import tree_leaves

from lathe import html_page
from lathe.callbacks.profiler import Operator, TorchProfiler, activities, operators_of, table_of
from lathe.config.compression_plan import methods
from lathe.errors import require
from lathe.files import require_writable, whole, write_atomically
from lathe.measure import PeakMemory, SavedActivations, count_state, describe_cpu
from lathe.measure.plot import lines, shares
from lathe.runs.checkpoints import read_checkpoint, restore
from lathe.runs.inference import open_data
from lathe.runs.rundir import RunDir
from lathe.tasks import LightningTask, Task
from lathe.training.dry_run import DryRun

ROWS = 40  # operators and modules on the page
SNAPSHOT = "memory.pickle"
ENTRIES = 200_000  # allocations in a snapshot
MARK = "module: "  # begins the name of a module's range in a trace
BACKWARD = "autograd::engine::evaluate_function"
FRAMES = ("ProfilerStep", MARK)
COMPILED = "compiled step"
PARTS = {  # of a step, in order
    "data": "fetching and moving a batch, with the loop around it",
    "loop": "between the batch's arrival and the net",
    "forward": "the net's forward pass",
    "loss": "the loss and the sums of metrics",
    "forward and loss": "the forward pass, the loss and the sums of metrics",
    "backward": "gradients",
    "optimizer": "gradients to zero, clipping, the update of weights, and what is done after it",
    COMPILED: "forward, loss, backward, clipping and update as one function",
}


def profile(cfg: dict[str, Any]) -> dict[str, Any]:
    """Profile steps and inference batches of the run, write profile/ in it, print a summary; return the report."""
    request, run = cfg["request"], RunDir(cfg["paths"]["run_dir"])
    devices, warmup, steps = request["trainer"]["devices"], request["warmup"], request["steps"]
    require(devices == 1, f"trainer.devices={devices}: one device is profiled; leave it at 1.")
    folder = run.path / "profile"
    folder.mkdir(exist_ok=True)
    require_writable(folder)
    file = run.checkpoint(request["checkpoint"], "checkpoint")
    left_out = list(methods(cfg.get("compression") or {}))
    accumulated = int(cfg["trainer"].get("accumulate_grad_batches", 1))
    total = warmup + 2 * steps + 2
    model = {**cfg["model"], "pretrained": None}
    cfg = {**cfg, "model": model, "ckpt_path": None, "find": {"steps": total, "output": str(folder / "of")}}
    trial = DryRun(cfg)
    task = trial.task
    restore(task.net, read_checkpoint(file), str(file))
    compiled, own = bool(cfg["compile"].get("enabled")), isinstance(task, LightningTask)
    parts = PartTimes(task.net, warmup, steps, divides=not compiled and not own)
    batches = (count * accumulated for count in (warmup + steps, 1, steps))
    recorder = Recorder(task.net, not compiled, folder, *batches)
    memory = StepMemory(total * accumulated, folder)
    trainer = trial.fit(parts, recorder, memory)
    device = trainer.strategy.root_device
    notes = []
    if left_out:
        notes.append(f"A step without what compression={','.join(left_out)} does in it, of the net as it is now.")
    if compiled:
        notes.append(
            "The net is compiled: its modules, its forward pass without the loss, and what it takes of a CPU's memory "
            "are not measured. A run with compile=none has them."
        )
    if own:
        notes.append("Inference of a user's LightningModule is not measured: its inputs and outputs are not known.")
    report: dict[str, Any] = {
        "run": str(run.path),
        "checkpoint": request["checkpoint"],
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else describe_cpu()["name"],
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "precision": str(trainer.precision),
        "steps": steps,
        "notes": notes,
        "training": {
            "parts": median_step(parts.seconds[warmup : warmup + steps]),
            "operators": [operator._asdict() for operator in recorder.operators[:ROWS]],
            "modules": [module._asdict() for module in recorder.modules[:ROWS]],
            "memory": memory.figures if device.type == "cuda" or not compiled else {},
            "trace": recorder.file,
        },
        "inference": {} if own else inference(cfg, task, trainer, folder, warmup, steps, compiled),
    }
    write_atomically(folder / "profile.json", json.dumps(report, indent=1) + "\n")
    write_atomically(folder / "profile.html", page_of(report))
    show(report, folder, request["top_k"])
    return report


def inference(
    cfg: dict[str, Any], task: Task, trainer: Trainer, folder: Path, warmup: int, steps: int, compiled: bool
) -> dict[str, Any]:
    """Profile validation batches through the net in eval mode, in the run's precision."""
    device, net = trainer.strategy.root_device, task.net
    net.to(device).eval()
    batches = (batch[0] for batch in chain.from_iterable(repeat(open_data(cfg, task).eval_loader("val", device))))

    def forward(x: Any) -> None:
        with trainer.precision_plugin.forward_context():
            net(x)

    with torch.inference_mode():
        seconds, clock = [], Clock(device)
        for _ in range(warmup + steps):
            clock.take()
            x = next(batches)
            waited = clock.take()
            forward(x)
            seconds.append({"data": waited, "forward": clock.take()})
        inputs = [next(batches) for _ in range(steps)]
        with ExitStack() as stack:
            if not compiled:
                stack.enter_context(marked(net))
            done = stack.enter_context(torch_profile(activities=activities(device.type), acc_events=True))
            for x in inputs:
                forward(x)
        tensors = [leaf for leaf in tree_leaves(inputs[0]) if isinstance(leaf, Tensor)]
        memory: dict[str, Any] = {}
        if device.type == "cuda" or not compiled:
            timeline = Timeline(device, [*net.parameters(), *net.buffers(), *tensors])
            with timeline:
                forward(inputs[0])
            memory = timeline.summary()
    name = "inference.trace.json"
    with whole(folder / name) as temporary:
        done.export_chrome_trace(str(temporary))
    modules = [] if compiled else module_times(done.events(), net, device.type == "cuda", steps)
    return {
        "batch": len(tensors[0]),
        "parts": median_step(seconds[warmup:]),
        "operators": [operator._asdict() for operator in operators_of(done, device.type, steps, FRAMES)[:ROWS]],
        "modules": [module._asdict() for module in modules[:ROWS]],
        "memory": memory,
        "trace": name,
    }


# parts of a step, without a profiler


class Clock:
    """A stopwatch that synchronizes with the GPU."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.last = device, 0.0
        self.take()

    def take(self) -> float:
        """Return the seconds since the last call."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        now = time.perf_counter()
        passed, self.last = now - self.last, now
        return passed


class PartTimes(Callback):
    """Time each part of `steps` optimizer steps, after `warmup` steps: `seconds` has those of each step.

    The time after a step counts as the next step's data. The forward pass and the loss of a compiled net or of a user's
    LightningModule are timed as one part, without `divides`.
    """

    skippable_steps = None  # needs every step

    def __init__(self, net: nn.Module, warmup: int, steps: int, divides: bool) -> None:
        self.net, self.total = net, warmup + steps
        self.loss, self.divides = "loss" if divides else "forward and loss", divides
        self.seconds: list[dict[str, float]] = []
        self._now: dict[str, float] = {}
        self._clock: Clock | None = None
        self._handles: list[Any] = []
        self._steps = 0
        self._has_loss = False  # whether the batch's loss has been computed

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._clock = Clock(trainer.strategy.root_device)
        if self.divides:
            self._handles = [
                self.net.register_forward_pre_hook(lambda *_: self._mark("loop")),
                self.net.register_forward_hook(lambda *_: self._mark("forward")),
            ]

    def _mark(self, part: str) -> None:
        if self._clock is not None:
            self._now[part] = self._now.get(part, 0.0) + self._clock.take()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._mark("data")
        self._has_loss = False

    def on_before_zero_grad(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        self._mark(self.loss)
        self._has_loss = True

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Any) -> None:
        self._mark("optimizer" if self._has_loss else self.loss)  # an accumulated batch has no zero_grad

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._mark("backward")

    def on_whole_step(self, trainer: Trainer, pl_module: LightningModule, loss: Any) -> None:
        """Time a step that is one compiled function."""
        self._mark(COMPILED)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._mark("loop" if COMPILED in self._now else "optimizer")
        if trainer.global_step == self._steps:
            return  # gradients are being accumulated
        self._steps = trainer.global_step
        self.seconds.append(self._now)
        self._now = {}
        if len(self.seconds) == self.total:
            self._clock = None
            for handle in self._handles:
                handle.remove()


def median_step(steps: list[dict[str, float]]) -> dict[str, float]:
    """Return the ms of each part and of the `step` of median time; medians of parts would not add up to a step."""
    times = sorted(steps, key=lambda step: sum(step.values()))[(len(steps) - 1) // 2]
    parts = {part: 1e3 * times[part] for part in PARTS if part in times}
    return {**parts, "step": sum(parts.values())}


# operators and modules, by torch's profiler


class Recorder(TorchProfiler):
    """Record operators, modules (unless compiled) and a trace of the active batches."""

    file = "training.trace.json"
    skippable_steps = None  # type: ignore[assignment]  # needs every step

    def __init__(self, net: nn.Module, by_module: bool, folder: Path, wait: int, warmup: int, active: int) -> None:
        super().__init__(wait=wait, warmup=warmup, active=active)
        self.net, self.by_module, self.folder = net, by_module, folder
        self.operators: list[Operator] = []
        self.modules: list[ModuleTime] = []
        self._marks, self._batches = ExitStack(), 0

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._batches += 1
        if self.by_module and self._batches == self.wait + 1:
            self._marks.enter_context(marked(self.net))

    def _write(self, done: torch_profile) -> None:
        assert self._trainer is not None
        self._marks.close()
        device, steps = self._trainer.strategy.root_device.type, self.active // self._trainer.accumulate_grad_batches
        self.operators = operators_of(done, device, steps, FRAMES)
        if self.by_module:
            self.modules = module_times(done.events(), self.net, device == "cuda", steps)
        self.trace = self.folder / self.file
        with whole(self.trace) as temporary:
            done.export_chrome_trace(str(temporary))


class ModuleTime(NamedTuple):
    """Milliseconds per step of a module, without its submodules."""

    name: str
    kind: str
    forward: float
    backward: float


@contextmanager
def marked(net: nn.Module) -> Iterator[None]:
    """Record each module call below `net` as a range of the trace, named after the module."""
    names, frames = {module: MARK + (name or "the net") for name, module in net.named_modules()}, list[Any]()

    def enter(module: nn.Module, args: Any) -> None:
        if module in names:
            frames.append(record_function(names[module]))
            frames[-1].__enter__()

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        if module in names:
            frames.pop().__exit__(None, None, None)

    handles = [register_module_forward_pre_hook(enter), register_module_forward_hook(leave, always_call=True)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def module_times(events: Any, net: nn.Module, on_gpu: bool, steps: int) -> list[ModuleTime]:
    """Return the times of all modules that were called, the slowest first.

    A backward operation has the sequence number of its forward operation, which gives its module. Recomputed forward
    passes count as backward.
    """

    def took(event: Any) -> float:
        return float(event.device_time_total if on_gpu else event.cpu_time_total) / 1e3 / steps

    forward: dict[str, float] = defaultdict(float)
    backward: dict[str, float] = defaultdict(float)
    numbers: dict[int, str] = {}
    for event in events:
        parent, owner, in_backward = event.cpu_parent, None, False  # owner: the module that contains the event
        while parent is not None:
            in_backward |= parent.name.startswith(BACKWARD)
            if owner is None and parent.name.startswith(MARK):
                owner = parent.name
            parent = parent.cpu_parent
        if in_backward:
            continue
        if event.name.startswith(MARK):
            forward[event.name] += took(event)
            if owner is not None:
                forward[owner] -= took(event)
        elif owner is not None and event.sequence_nr >= 0:
            numbers.setdefault(event.sequence_nr, owner)
    for event in events:
        if event.name.startswith(BACKWARD) and event.sequence_nr in numbers:
            backward[numbers[event.sequence_nr]] += took(event)
    kinds = {MARK + (name or "the net"): type(module).__name__ for name, module in net.named_modules()}
    times = [
        ModuleTime(name.removeprefix(MARK), kinds[name], max(0.0, forward[name]), backward[name]) for name in forward
    ]
    return sorted(times, key=lambda module: -(module.forward + module.backward))


# memory


class Timeline(PeakMemory):
    """Record, on a CPU, the bytes after each operation in `points`, and the operation of the peak in `at`."""

    def __init__(self, device: torch.device, known: Iterable[Tensor] = ()) -> None:
        super().__init__(device, known)
        self.points: list[int] = []
        self.at = ""
        self.reset()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = self._peak
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if result is not NotImplemented:
            self.points.append(self.bytes)
            self.at = str(func) if self._peak > before else self.at
        return result

    def summary(self, most: int = 400) -> dict[str, Any]:
        """Return the peak, its operation, and (operation, bytes) of at most `most` maxima of the timeline."""
        size = max(1, -(-len(self.points) // most))
        stretches = [range(i, min(i + size, len(self.points))) for i in range(0, len(self.points), size)]
        highest = [max(stretch, key=lambda at: self.points[at]) for stretch in stretches]
        timeline = {"timeline": [(at, self.points[at]) for at in highest]} if highest else {}
        return {"peak": self.peak, "at": self.at} | timeline


class StepMemory(Callback):
    """Measure batch `batch` of the fit: bytes of the peak, of persistent tensors and of activations."""

    skippable_steps = None  # needs every step

    def __init__(self, batch: int, folder: Path) -> None:
        self.batch, self.folder, self.figures = batch, folder, dict[str, Any]()
        self._seen = 0

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._seen += 1
        if self._seen != self.batch:
            return
        device, state = trainer.strategy.root_device, [list(each.state.values()) for each in trainer.optimizers]
        inputs, states = ([leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)] for tree in (batch, state))
        gradients = [parameter.grad for parameter in pl_module.parameters() if parameter.grad is not None]
        self._saved = SavedActivations(pl_module, inputs)
        self._timeline = Timeline(device, [*pl_module.parameters(), *pl_module.buffers(), *gradients, *states, *inputs])
        if device.type == "cuda":
            torch.cuda.memory._record_memory_history(max_entries=ENTRIES)
        self._saved.__enter__()
        self._timeline.__enter__()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._seen != self.batch or self.figures:
            return
        self._timeline.__exit__(None, None, None)
        self._saved.__exit__(None, None, None)
        counted = asdict(count_state(pl_module, trainer.strategy.optimizers))
        self.figures = {**self._timeline.summary(), **counted, "activations": self._saved.peak}
        if trainer.strategy.root_device.type == "cuda":
            with whole(self.folder / SNAPSHOT) as temporary:
                torch.cuda.memory._dump_snapshot(str(temporary))
            torch.cuda.memory._record_memory_history(enabled=None)
            self.figures["snapshot"] = SNAPSHOT


# the page, and what is printed


def page_of(report: Mapping[str, Any]) -> str:
    facts = [
        str(report["run"]),
        f"{report['checkpoint']}.ckpt",
        f"{report['device']}, {report['threads']} CPU threads",
        f"precision {report['precision']}",
        f"torch {report['torch']}",
        f"the step of median time of {report['steps']}",
    ]
    kinds = {"training": "A training step", "inference": "An inference batch"}
    sections = [html for kind, name in kinds.items() if report[kind] for html in _sections(name, report[kind])]
    return html_page.page("Profile: time and memory of a step", facts, report["notes"], sections)


def _sections(name: str, measured: Mapping[str, Any]) -> Iterator[str]:
    section, table, figure = html_page.section, html_page.table, html_page.figure
    times = dict(measured["parts"])
    step = times.pop("step")
    batch = f" of {measured['batch']} samples" if "batch" in measured else ""
    rows = [(part, PARTS[part], f"{took:.3f}", f"{took / step:.1%}") for part, took in times.items()]
    bar = figure(shares(times, "ms"), "Each colour is a part of the table below, as wide as its share of the time.")
    parts = table(("part", "contents", "ms", "share"), rows, texts=2, keys=True)
    yield section(f"{name}{batch}: {step:.3f} ms", f"Trace for ui.perfetto.dev: {measured['trace']}", bar, parts)
    rows = [(o["name"], f"{o['calls']:g}", f"{o['ms']:.3f}", f"{o['share']:.1%}") for o in measured["operators"]]
    operators = table(("operator", "calls", "ms", "share"), rows)
    yield section(f"Operators of {name.lower()}", "Time of each, without the operators that it calls.", operators)
    if measured["modules"]:
        head = ("module", "class", "forward, ms", "backward, ms", "both, ms")
        modules = []
        for m in measured["modules"]:
            both = m["forward"] + m["backward"]
            modules.append((m["name"], m["kind"], f"{m['forward']:.3f}", f"{m['backward']:.3f}", f"{both:.3f}"))
        caption = "Time of each, without the modules in it, while the profiler records."
        yield section(f"Modules of {name.lower()}", caption, table(head, modules, texts=2))
    memory = measured["memory"]
    if not memory:
        return
    tensors = {
        "peak": "the most at a moment",
        "parameters": "parameters and buffers",
        "gradients": "gradients",
        "optimizer": "the optimizer's state",
        "activations": "what the forward pass keeps for the backward pass, at most",
    }
    bytes_of = [(text, f"{memory[key] / 2**20:.2f}") for key, text in tensors.items() if key in memory]
    contents = [table(("tensors", "MiB"), bytes_of)]
    notes = [f"The peak is at {memory['at']}."] if memory["at"] else []
    if "snapshot" in memory:
        notes.append(f"The allocator's record, for pytorch.org/memory_viz: {memory['snapshot']}.")
    if "timeline" in memory:
        points = [(float(index), size / 2**20) for index, size in memory["timeline"]]
        drawn = lines("Tensors in memory", "operation", "MiB", {"tensors": points})
        contents.append(figure(drawn, "Memory of all tensors after each operation, in the order of calls."))
    row = f'<div class="row">{"".join(contents)}</div>'
    yield section(f"Memory of {name.lower()}", " ".join(notes), row)


def show(report: dict[str, Any], folder: Path, top_k: int) -> None:
    """Print the parts and the most expensive operators."""
    for name, measured in (("a training step", report["training"]), ("an inference batch", report["inference"])):
        if measured:
            times = dict(measured["parts"])
            step = times.pop("step")
            parts = ", ".join(f"{part} {took:.3f} ms ({took / step:.0%})" for part, took in times.items())
            print(f"{name}: {step:.3f} ms, the median of {report['steps']}: {parts}")
            operators = [Operator(**row) for row in measured["operators"][:top_k]]
            Console().print(table_of(f"operators of {name}, each without those that it calls", operators))
            if measured["memory"]:
                print(f"peak memory of {name}: {measured['memory']['peak'] / 2**20:.1f} MiB")
    for note in report["notes"]:
        print(note)
    print(f"{folder / 'profile.html'} has more; the traces open at https://ui.perfetto.dev")
