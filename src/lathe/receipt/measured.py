"""Measure a run's receipt from its directory, and write receipt.json, receipt.md and receipt.svg."""

import copy
import json
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn

from lathe import export, measure
from lathe.compression import quantization
from lathe.compression.structure import structure_of
from lathe.config.compression_plan import methods
from lathe.config.metric_names import ENERGY, data_keys, on_test, without_split
from lathe.config.resolve import data_folder_of, differences, set_data_folder
from lathe.data.checks import undeclared
from lathe.data.order import IGNORE
from lathe.errors import UserError, require
from lathe.export.inputs import FlatCore, as_list
from lathe.files import require_plain, scratch, write_atomically
from lathe.measure import Agreement, AgreementMeter, PeakMemory, count_macs, count_parameters, interleaved, verdict
from lathe.measure.calls import Call
from lathe.receipt import page
from lathe.runs.build import make_task
from lathe.runs.checkpoints import checkpoint_hash, read_checkpoint
from lathe.runs.inference import Forward, is_lightning, open_data, open_run_net, score
from lathe.runs.rundir import RunDir, run_command
from lathe.tasks import Task
from lathe.tasks.core import EXAMPLE, record_calls

CPU = torch.device("cpu")
Input = Tensor | tuple[Tensor, ...]  # of a net, or of the core of a LightningModule


@dataclass(frozen=True)
class Effort:
    """The extent of the measurement.

    `all_cores` is measured in addition to one thread; `compiled` adds compiled forms of this net and of the dense one
    in float32; `targets` are additional export targets; `repeats` and `seconds` limit the timed calls of a cell.
    """

    batches: tuple[int, ...] = (1, 32)
    all_cores: bool = False
    compiled: bool = False
    targets: tuple[str, ...] = ()
    repeats: int = 50
    warmup: int = 5
    seconds: float = 6.0
    about: str = "60 s"  # time for the whole receipt of a small net


EFFORTS = {
    "quick": Effort(),
    "full": Effort(
        all_cores=True, compiled=True, targets=("aot_inductor",), repeats=200, warmup=10, seconds=30.0, about="5 min"
    ),
}


def receipt(cfg: dict[str, Any]) -> dict[str, Any]:
    """Measure the requested run (scripts/receipt.py), compare it with the dense net, and return the receipt."""
    request, run, devices = cfg["request"], RunDir(cfg["paths"]["run_dir"]), cfg["trainer"]["devices"]
    require(devices in (1, "auto"), f"trainer.devices={devices}: a receipt is measured on one device.")
    run.checkpoint("best")
    baseline = Path(request["baseline"]) if request["baseline"] is not None else None
    with run.locked():
        return write(run, cfg, baseline, request["effort"])


def write(run: RunDir, cfg: dict[str, Any], baseline: Path | None, effort: str) -> dict[str, Any]:
    """Measure `run`'s best checkpoint and the dense net, in one process, and write the receipt.

    The dense net is that of the run directory `baseline`, by default of the run in `ckpt_path`. Without either it is
    the configured net before compression with random weights, which has time and size, but no metrics. Exported files
    are not kept, since scripts/export.py adds preprocessing and a comparison with the module.
    """
    if not run.best.exists():
        rank_zero_warn(
            f"{run.path} has no receipt: it kept no best checkpoint (trainer.enable_checkpointing, "
            "callbacks.checkpoint)."
        )
        return {}
    for name in ("receipt.svg", "receipt.md", "receipt.json"):
        require_plain(run.path / name)
    threads = torch.get_num_threads()
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad(), page.progress(EFFORTS[effort].about) as step:
            kind = CoreReceipt if is_lightning(run.config) else Receipt
            content = kind(run, cfg, baseline or _started_from(run), effort, step).measured()
    finally:
        torch.set_num_threads(threads)
    for text in content["warnings"]:
        rank_zero_warn(text)
    _put(run, content, current_comparison(run))
    page.show(content, run.path)
    return content


def _started_from(run: RunDir) -> Path | None:
    """Return the run directory of `ckpt_path`, which may be one of its checkpoints, if it still exists."""
    path = Path(run.config.get("ckpt_path") or "")
    folders = [path, path.parent.parent] if path.name else []
    own = run.path.resolve()  # ckpt_path=logs/latest may point to this run by now
    return next((folder for folder in folders if (folder / "config.yaml").is_file() and folder.resolve() != own), None)


# The comparison of runtimes that scripts/benchmark.py adds as "inference", and the files


def fingerprint(run: RunDir) -> dict[str, Any]:
    """Return the optimizer step and the SHA-256 of the run's best checkpoint, a file or a folder."""
    return {"step": int(read_checkpoint(run.best)["global_step"]), "sha256": checkpoint_hash(run.best)}


def current_comparison(run: RunDir) -> dict[str, Any] | None:
    """Return the comparison of runtimes in the run's receipt if it measured the current weights; else None."""
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError, UserError):
        section = run.receipt["inference"]
        if section["checkpoint"] == fingerprint(run):
            return dict(section)
    return None


def add_comparison(run: RunDir, section: Mapping[str, Any]) -> bool:
    """Replace the comparison of runtimes in the run's receipt; return False if the run has no receipt."""
    path = run.path / "receipt.json"
    if not path.is_file():
        return False
    try:
        _put(run, run.receipt, section)
    except (UserError, ValueError, KeyError, TypeError, AttributeError) as error:
        command = run_command("scripts/receipt.py", "run", run.path)
        raise UserError(f"{path} can't be read as a receipt: {command} measures again.") from error
    return True


def _put(run: RunDir, receipt: Mapping[str, Any], section: Mapping[str, Any] | None) -> None:
    """Write receipt.svg, receipt.md and last receipt.json; `section` replaces the comparison."""
    content = {key: value for key, value in receipt.items() if key != "inference"}
    content |= {} if section is None else {"inference": dict(section)}
    texts = {
        "receipt.svg": page.figure(content),
        "receipt.md": page.markdown(content),
        "receipt.json": json.dumps(content, indent=2) + "\n",
    }
    for name, text in texts.items():
        write_atomically(run.path / name, text)


# The forms of a net: eager, compiled, the file of an export target; and their interleaved times


@dataclass(frozen=True)
class Opened:
    """A form that is ready to run: `call` runs its own batch, `forward` any batch on the CPU."""

    call: Callable[[], Any]
    forward: Callable[[Tensor], Tensor]


class Form:
    """A net in one runtime: `of` is "this" or "dense", `backend` the runtime, `name` both."""

    def __init__(self, of: str, backend: str, device: torch.device = CPU) -> None:
        self.of, self.backend, self.device, self.name = of, backend, device, f"{of} {backend}"

    def open(self, x: Input, threads: int) -> Opened:
        """Prepare it for the batch `x` [batch, ...] on the CPU and this number of threads."""
        raise NotImplementedError


class Module(Form):
    """The module itself, with `bf16` under autocast; `compiled` is inductor with frozen weights, for one batch size."""

    def __init__(
        self, of: str, net: nn.Module, device: torch.device = CPU, bf16: bool = False, compiled: bool = False
    ) -> None:
        backend = f"compiled_{'bf16' if bf16 else 'fp32'}" if compiled else "eager_bf16" if bf16 else "eager"
        super().__init__(of, backend, device)
        self.net, self.compiled = _Autocast(net, device.type) if bf16 else net, compiled

    def open(self, x: Input, threads: int) -> Opened:
        copied = self.compiled or self.device != CPU
        net: Callable[..., Tensor] = copy.deepcopy(self.net).to(self.device) if copied else self.net
        inside = [tensor.to(self.device) for tensor in as_list(x)]
        if not self.compiled:
            return Opened(lambda: net(*inside), lambda batch: net(batch.to(self.device)).float().cpu())
        # Exceeding the recompile limit is an error: torch would silently run eagerly.
        with warnings.catch_warnings(), torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
            warnings.simplefilter("ignore", DeprecationWarning)  # from inductor's imports
            net = torch.compile(net, dynamic=False, options={"freezing": True})
            net(*inside)
            size = len(inside[0])

        def forward(batch: Tensor) -> Tensor:
            parts = []
            for part in batch.split(size):
                full = torch.cat([part, part[:1].expand(size - len(part), *part.shape[1:])])
                parts.append(net(full.to(self.device))[: len(part)].float().cpu())
            return torch.cat(parts)

        return Opened(lambda: net(*inside), forward)


class _Autocast(nn.Module):
    """Autocast inside the compiled region: outside, it would slow every call of a small net."""

    def __init__(self, net: nn.Module, device_type: str) -> None:
        super().__init__()
        self.net, self.device_type = net, device_type

    def forward(self, *x: Tensor) -> Any:
        with torch.autocast(self.device_type, torch.bfloat16):
            return self.net(*x)


class Target(Form):
    """The file of an export target in its own runtime and device, from and to host arrays."""

    def __init__(self, of: str, target: str, path: Path, device: torch.device = CPU) -> None:
        super().__init__(of, target, device)
        self.path = path

    def open(self, x: Input, threads: int) -> Opened:
        run = export.get(self.backend).load(self.path, threads)
        inside = [tensor.numpy() for tensor in as_list(x)]
        return Opened(lambda: run(*inside), lambda batch: torch.from_numpy(np.asarray(run(batch.numpy()))).float())


def export_to(target: str, net: nn.Module, example: Input, folder: Path, **options: Any) -> Path:
    """Export `net` to `target` with these options, below `folder`, and return the file."""
    module = export.get(target, **options)
    missing = module.available()
    if missing is not None:
        raise UserError(missing)
    path = folder / target / f"model{module.suffix}"
    path.parent.mkdir(parents=True)
    quiet = logging.root.manager.disable
    logging.disable(max(quiet, logging.INFO))  # exporters log every pass over the graph
    try:
        module.export(copy.deepcopy(net), example, path)
    finally:
        logging.disable(quiet)
    return path


def reason(error: BaseException) -> str:
    """Return the first line of an error, with its class unless it is a UserError."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or ["no message"]
    return lines[0] if isinstance(error, UserError) else f"{type(error).__name__}: {lines[0]}"


def references(form: Form) -> dict[str, str]:
    """Return what a row is compared with, by column; the gain over its twin in the same runtime is compression's."""
    twin = f"dense {page.FLOAT_TWIN.get(form.backend, form.backend)}"
    return {"eager": "dense eager", "bf16": "dense compiled_bf16", "twin": twin}


def time_forms(
    forms: Sequence[Form],
    cells: Sequence[tuple[torch.device, int, int]],
    sample: Callable[[int], Input],
    limits: tuple[int, int, float],
    left_out: list[dict[str, str]],
    beside: Callable[[Form], Mapping[str, str]] = references,
    check: Callable[[Form, Opened], None] = lambda form, opened: None,
    step: Callable[[str], None] = lambda text: None,
) -> list[dict[str, Any]]:
    """Return a row for each form in each cell: a device, a batch size and a number of threads.

    `sample` makes a batch of a given size; `limits` are repeats, warm-up calls and seconds, as in `interleaved`. Forms
    that can't be opened, or fail `check`, go to `left_out` with the reason; `step` is called with what is measured
    next.
    """
    rows: list[dict[str, Any]] = []
    for device, batch, threads in cells:
        torch.set_num_threads(threads)
        x, opened = sample(batch), dict[Form, Opened]()
        for form in (form for form in forms if form.device == device):
            step(f"{form.name}, batch {batch}")
            try:
                ready = form.open(x, threads)
                ready.call()
                check(form, ready)
                opened[form] = ready
            except Exception as error:  # a failing back end must not hide the others
                where = f"{form.name}, {device.type}, batch {batch}, {threads} thread{'s' * (threads > 1)}"
                left_out.append({"form": where, "reason": reason(error)})
        step(f"timing, batch {batch}")
        times = interleaved({form.name: ready.call for form, ready in opened.items()}, *limits, device)
        for form in opened:
            this = times[form.name]
            row = {
                **{"of": form.of, "backend": form.backend, "device": device.type, "batch": batch},
                "threads": threads if device == CPU else None,
                **{"median_ms": this.median * 1e3, "p10_ms": this.p10 * 1e3, "p90_ms": this.p90 * 1e3, "n": this.n},
            }
            for key, name in beside(form).items():
                other = times.get(name)
                row[f"over_{key}"] = this.median / other.median if other else None
                row[f"beside_{key}"] = verdict(this, other) if other and name != form.name else None
            rows.append(row)
        torch.compiler.reset()  # earlier cells' graphs would count towards torch's recompile limit
    return rows


# Measurement


class Receipt:
    """The parts of a receipt, in order."""

    def __init__(
        self, run: RunDir, cfg: dict[str, Any], baseline: Path | None, effort: str, step: Callable[[str], None]
    ) -> None:
        self.run, self.effort, self.baseline, self.step = run, EFFORTS[effort], baseline, step
        gpu = cfg["trainer"]["accelerator"] in ("auto", "gpu", "cuda") and torch.cuda.is_available()
        self.devices = [CPU, torch.device("cuda")] if gpu else [CPU]
        self.left_out: list[dict[str, str]] = []
        self.open(cfg)
        try:
            fits = self.same_outputs()
        except RuntimeError:  # raised by torch for shapes that don't fit
            fits = False
        require(
            fits,
            f"baseline={baseline} takes inputs of another kind than this run's, or has other outputs: give a run on "
            "the same data.",
        )

    def open(self, cfg: dict[str, Any]) -> None:
        self.task, self.cfg = open_run_net(self.run.path)
        self.net: nn.Module = self.task.net
        self.dense, self.notes = self._open_dense(self.baseline)
        self.split = "test" if self.cfg["test"] else "val"  # test=false keeps the test split unseen
        if data_folder_of(cfg) != data_folder_of(self.cfg):  # the command has another folder, since they have moved
            set_data_folder(self.cfg, data_folder_of(cfg))
        self.data = open_data(self.cfg, self.task)
        self.first: Tensor = next(iter(self.data.eval_loader(self.split)))[0].clone()
        monitor = (self.cfg["callbacks"].get("checkpoint") or {}).get("monitor") or "auto"
        self.monitor = self.task.monitor if monitor == "auto" else monitor
        self.metric, self.undeclared = self.task.monitor.rpartition("/")[2], undeclared(self.cfg["data"])

    def same_outputs(self) -> bool:
        """Return whether both nets answer with the same shape."""
        return self.net(self.sample(1)).shape == self.dense.net(self.sample(1)).shape

    def _open_dense(self, baseline: Path | None) -> tuple[Task, list[str]]:
        if baseline is None:
            return make_task(self.cfg, train=False).eval(), []
        require(
            baseline.resolve() != self.run.path.resolve(),
            f"baseline={baseline} is this run itself: name the run of the dense net.",
        )
        task, cfg = open_run_net(baseline, "baseline", own=True)
        notes = []
        if structure_of(task.net) or weight_sparsity(task.net) >= page.NOTHING:
            notes.append("The baseline is itself a compressed net: ratios are to it, not to a dense one.")
        unlike = {f"data.{line.partition(':')[0]}": line for line in differences(cfg["data"], self.cfg["data"])}
        others = data_keys(unlike)
        if others:
            notes.append(f"The baseline was trained on other data ({unlike[others[0]]}).")
        return task, notes

    def sample(self, n: int) -> Input:
        """Return a batch of `n` of the split's first inputs, repeated if they are fewer."""
        return self.first[torch.arange(n) % len(self.first)].clone()

    def measured(self) -> dict[str, Any]:
        kinds = {name: node["kind"] for name, node in methods(self.cfg.get("compression") or {}).items()}
        sample, cores = self.sample(1), measure.usable_cores()
        size, dense = sizes(self.net, sample), sizes(self.dense.net, sample)
        if self.baseline is None:  # random weights, whose zeros are meaningless
            dense |= {"non_zero": dense["parameters"], "effective_macs": dense["macs"]}
        content: dict[str, Any] = {
            "name": self.run.path.name,
            "compression": kinds,
            "structure": sorted(structure_of(self.net)),
            "baseline": str(self.baseline) if self.baseline else None,
            "split": self.split,
            "metric": self.metric,
            "chosen": {"by": self.monitor, "step": int(read_checkpoint(self.run.best)["global_step"])},
            "warnings": changed_nothing(kinds, self.net),
            "size": size | {"sparsity": weight_sparsity(self.net)},
            "dense": {"size": dense, "trained": self.baseline is not None},
            "energy": {"this": _energy(self.run), "dense": _energy(RunDir(self.baseline) if self.baseline else None)},
            "layers": layers(self.net, sample),
            "memory": [],
            "figure": "receipt.svg",
            "undeclared": self.undeclared,
        }
        cells = []
        for device in self.devices:
            for of, net in (("this", self.net), ("dense", self.dense.net)):
                there = net if device == CPU else copy.deepcopy(net).to(device)
                for batch in self.effort.batches:
                    peak = peak_memory(there, self.sample(batch))
                    content["memory"].append({"of": of, "device": device.type, "batch": batch, "bytes": peak})
            threads = (1, cores) if self.effort.all_cores and cores > 1 and device == CPU else (1,)
            cells += [(device, batch, n) for n in threads for batch in self.effort.batches]
        with scratch() as folder:
            forms, content["files"] = self._forms(folder)
            ships = page.shipped(content["files"])
            content["ships"] = ships["target"] if ships else None
            # gzipped, relative to the dense net's uncompressed file
            content["bytes_share"] = ships["share"] if ships else None
            content["figures"] = self._metrics(forms)
            limits = self.effort.repeats, self.effort.warmup, self.effort.seconds
            content["latency"] = time_forms(forms, cells, self.sample, limits, self.left_out, step=self.step)
        content["left_out"] = self.left_out
        content["hardware"] = {"cpu": measure.describe_cpu(), "gpu": measure.describe_gpu(self.devices[-1])}
        content["versions"] = measure.versions()
        content["findings"] = [*page.findings(content), *self.notes]
        content["method"] = page.method(content, self.effort.warmup)
        return content

    def _forms(self, folder: Path) -> tuple[list[Form], list[dict[str, Any]]]:
        """Return all forms to be timed, and a row for each file; failed exports are left out."""
        nets, forms = {"this": self.net, "dense": self.dense.net}, list[Form]()
        for device in self.devices:
            forms += [Module(of, net, device) for of, net in nets.items()]
            forms.append(Module("dense", self.dense.net, device, bf16=True, compiled=True))
            if self.effort.compiled:
                forms.append(Module("dense", self.dense.net, device, compiled=True))
                forms += [Module("this", self.net, device, bf16, compiled=True) for bf16 in (False, True)]
        own = "onnx_int8" if "quantization" in structure_of(self.net) else "onnx"
        exports = [("dense", target, CPU) for target in ("onnx", "weights")]
        exports += [("this", target, CPU) for target in (own, "weights", *self.effort.targets)]
        if "aot_inductor" in self.effort.targets:  # also compiled for a GPU: timed, but not a file of the receipt
            exports += [(of, "aot_inductor", device) for device in self.devices[1:] for of in nets]
        files: dict[tuple[str, str], tuple[int, int]] = {}  # bytes, plain and gzipped
        for of, target, device in exports:
            form = f"{of} {target}" + ("" if device == CPU else f", {device.type}")
            self.step(f"{form}, export")
            options = {} if device == CPU else {"device": device.type}
            try:
                path = export_to(target, nets[of], self.sample(2), folder / device.type / of, **options)
            except Exception as error:  # a failing back end must not stop the rest of the receipt
                self.left_out.append({"form": form, "reason": reason(error)})
                continue
            if device == CPU:
                files[of, target] = measure.file_size(path)
            if target != "weights":
                forms.append(Target(of, target, path, device))
        rows = []
        for (of, target), (size, gzipped) in files.items():
            row = {"of": of, "target": target, "bytes": size, "gzipped": gzipped}
            dense, dense_gzipped = files.get(("dense", "weights" if target == "weights" else "onnx"), (None, 1))
            row |= dict.fromkeys(("ratio", "gzipped_ratio", "share"))
            if dense is not None:
                row |= {"ratio": size / dense, "gzipped_ratio": gzipped / dense_gzipped, "share": gzipped / dense}
            rows.append(row)
        return forms, rows

    def _metrics(self, forms: Iterable[Form]) -> list[dict[str, Any]]:
        """Return metrics of the module on both splits, of each back end, and of a trained dense net."""
        trained, rows = self.baseline is not None, list[dict[str, Any]]()
        reference = (lambda x: self.dense.net(x).float()) if trained else None
        for form in [form for form in forms if form.device == CPU]:
            is_module = form.backend == "eager"
            if form.of == "dense" and not (trained and is_module):
                continue
            self.step(f"{form.name}, metrics")
            try:
                opened = form.open(self.sample(max(self.effort.batches)), torch.get_num_threads())
                for split in dict.fromkeys(("val", self.split)) if form.of == "this" and is_module else [self.split]:
                    beside = reference if form.of == "this" and split == self.split else None
                    metrics, agreement = scored(self.task, opened.forward, self.data.eval_loader(split), beside)
                    where = {"of": form.of, "backend": form.backend, "split": split}
                    rows.append({**where, "figures": metrics, "agreement": asdict(agreement) if agreement else None})
            except Exception as error:
                if is_module:
                    raise
                self.left_out.append({"form": f"{form.name}, figures", "reason": reason(error)})
        return rows


class CoreReceipt(Receipt):
    """The receipt of a module's core, called with example.pt; metrics are what its own steps have logged."""

    def open(self, cfg: dict[str, Any]) -> None:
        self.task, self.cfg = open_run_net(self.run.path, own=True)
        file = self.run.path / EXAMPLE
        if file.is_file():
            self.call = Call.load(file)
        else:
            self.call = record_calls(self.task, open_data(self.cfg, self.task).eval_loader("val"))[0]
        self.net = self._flat(self.task.core)
        task, self.notes = self._open_dense(self.baseline)
        try:
            # the submodule of the same name: that run may have named another core, or none
            dense = self._flat(task.net.get_submodule(self.task.core_name))
            self.dense: Any = SimpleNamespace(net=dense)
        except (AttributeError, RuntimeError, TypeError, ValueError, UserError) as error:  # of a core with other inputs
            raise UserError(f"baseline={self.baseline} takes other inputs than this run's core.") from error
        self.result = self.run.result if self.run.complete else {}
        monitor = self.result.get("monitor") or (self.cfg["callbacks"].get("checkpoint") or {}).get("monitor")
        self.monitor = str(monitor or "the last step, without callbacks.checkpoint.monitor")
        self.metric, self.undeclared = without_split(self.monitor), None
        self.split = "test" if self.cfg["test"] else "val"

    def _flat(self, core: nn.Module) -> nn.Module:
        """Return the core as a function of tensors; itself where it takes and returns one."""
        flat = FlatCore(core, self.call.args, self.call.kwargs)
        flat.find_batch()
        require(flat.has_batch, "model.core: it takes one batch size alone, and a receipt has several.")
        self.flat = flat
        with torch.no_grad():
            plain = isinstance(self.call.example, Tensor) and isinstance(core(flat.example[0].clone()), Tensor)
        return core.eval() if plain else flat

    def sample(self, n: int) -> Input:
        rows = self.flat.rows(self.flat.example, n)
        return rows if isinstance(self.net, FlatCore) else rows[0]

    def same_outputs(self) -> bool:
        mine, other = (as_list(net(*as_list(self.sample(1)))) for net in (self.net, self.dense.net))
        return [output.shape for output in mine] == [output.shape for output in other]

    def _metrics(self, forms: Iterable[Form]) -> list[dict[str, Any]]:
        dense = RunDir(self.baseline) if self.baseline is not None else None
        results = {"this": self.result, "dense": dense.result if dense is not None and dense.complete else {}}
        rows = []
        for of, result in results.items():
            for split, name in {"val": self.monitor, "test": on_test(self.monitor)}.items():
                if isinstance(result.get(name), float) and split in ("val", self.split):
                    where = {"of": of, "backend": "eager", "split": split}
                    rows.append({**where, "figures": {self.metric: result[name]}, "agreement": None})
        self.left_out.append(
            {
                "form": "metrics of the files, and equal predictions",
                "reason": "they need the module's own steps: scripts/export.py compares files and their metric",
            }
        )
        if not any(row["split"] == self.split for row in rows):
            name = on_test(self.monitor) if self.split == "test" else self.monitor
            self.left_out.append({"form": f"{self.split}/{self.metric}", "reason": f"result.json has no {name}"})
        return rows


def scored(
    task: Task, forward: Forward, batches: Iterable[Any], reference: Callable[[Tensor], Tensor] | None = None
) -> tuple[dict[str, float], Agreement | None]:
    """Return the metrics of `forward`, and its agreement with `reference`; targets of -100 are ignored."""
    meter, targets = AgreementMeter(task.predicts), list[Any]()

    def remembered() -> Iterator[Any]:
        for batch in batches:
            targets[:] = [batch[1]]
            yield batch

    def compared(x: Tensor) -> Tensor:
        outputs = torch.as_tensor(forward(x))
        if reference is not None:
            (target,) = targets
            all_count = task.predicts == "values" or (task.predicts == "classes" and target.is_floating_point())
            meter.add(outputs, reference(x), None if all_count else target != IGNORE)
        return outputs

    metrics = score(task, compared, remembered())
    return metrics, meter.result if reference is not None else None


def _energy(run: RunDir | None) -> dict[str, float]:
    """Return the joules of the run's training (energy_gpu_j, energy_cpu_j), which device_stats records."""
    result = run.result if run is not None and (run.path / "result.json").is_file() else {}
    return {name: result[name] for name in ENERGY if isinstance(result.get(name), float)}


def _weights(net: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the maskable weights: those of at least two dimensions."""
    for name, module in net.named_modules():
        weight = module._parameters.get("weight")
        if weight is not None and weight.dim() >= 2:
            yield name, weight


def _zeros(*tensors: Tensor) -> float:
    total = sum(tensor.numel() for tensor in tensors)
    return 1 - sum(int(tensor.detach().count_nonzero()) for tensor in tensors) / total if total else 0.0


def weight_sparsity(net: nn.Module) -> float:
    """Return the share of zeros among the maskable weights: those of at least two dimensions."""
    return _zeros(*(weight for _, weight in _weights(net)))


def changed_nothing(kinds: Mapping[str, str], net: nn.Module) -> list[str]:
    """Return a warning for each method that has left `net` unchanged; distillation is exempt."""
    structure, share = structure_of(net), weight_sparsity(net)
    unchanged = {
        "structure": ("channels" not in structure, "the net has all the channels that its configuration gives it"),
        "masks": (share < page.NOTHING, f"{f'a share of {share:.2g}' if share else 'none'} of the weights is zero"),
        "quantization": ("quantization" not in structure, "no layer is quantized"),
    }
    unchanged["after"] = unchanged["quantization"]
    effects = [(name, *unchanged.get(kind, (False, ""))) for name, kind in kinds.items()]
    return [f"compression={name} changed nothing: {why}." for name, is_unchanged, why in effects if is_unchanged]


def sizes(net: nn.Module, sample: Input) -> dict[str, int]:
    """Return the number of parameters and MACs; `sample` is a batch of one."""
    count, macs = count_parameters(net), count_macs(net, sample)
    return {"parameters": count.total, "non_zero": count.non_zero, "macs": macs.dense, "effective_macs": macs.effective}


def layers(net: nn.Module, sample: Input) -> list[dict[str, Any]]:
    """Return shape, zeros and MACs of each layer's weight; `integer_sparsity` is of the exported integers."""
    macs = count_macs(net, sample).layers
    quantized = quantization.quantized_layers(net) if "quantization" in structure_of(net) else {}
    return [
        {
            "name": name.removeprefix("core."),  # of a FlatCore
            "shape": list(weight.shape),
            "weights": weight.numel(),
            "sparsity": _zeros(weight),
            "integer_sparsity": (
                _zeros(quantization.integer_weight(quantized[name])[0]) if name in quantized else None
            ),
            "macs": macs.get(name, 0),
        }
        for name, weight in _weights(net)
    ]


def peak_memory(net: nn.Module, x: Input) -> int:
    """Return the peak bytes of tensors in an eager forward pass, with the net's; on a GPU without earlier ones."""
    device, own = next(net.parameters()).device, [*net.parameters(), *net.buffers()]
    inputs, before = [tensor.to(device) for tensor in as_list(x)], 0
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device) - sum(t.numel() * t.element_size() for t in own)
    with PeakMemory(device, known=[*own, *inputs]) as memory:
        memory.reset()
        net(*inputs)
        return memory.peak - before
