"""Measure a run's receipt from its directory, and write receipt.json, receipt.md and receipt.svg."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from rich.progress import Progress
from torch import Tensor, nn

from lathe import measure
from lathe.compression.structure import structure_of
from lathe.config.resolve import data_folder_of, differences, set_data_folder
from lathe.data.checks import undeclared
from lathe.errors import UserError, require
from lathe.files import scratch
from lathe.receipt import facts, kept, page, words
from lathe.receipt.forms import CPU, Compiled, Eager, Form, Target, export_to, reason
from lathe.receipt.timing import time_forms
from lathe.runs.build import make_task
from lathe.runs.checkpoints import read_checkpoint
from lathe.runs.inference import open_data, open_run_net
from lathe.runs.metric_names import data_keys
from lathe.runs.rundir import RunDir
from lathe.tasks import Task


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
    kept.check_places(run)
    threads = torch.get_num_threads()
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad(), page.progress(EFFORTS[effort].about) as bar:
            found = _Receipt(run, cfg, baseline or _started_from(run), effort, bar).measured()
    finally:
        torch.set_num_threads(threads)
    for text in found["warnings"]:
        rank_zero_warn(text)
    kept.put(run, found, kept.still_true(run))
    page.show(found, run.path)
    return found


def _started_from(run: RunDir) -> Path | None:
    """Return the run directory of `ckpt_path`, which may be one of its checkpoints, if it still exists."""
    path = Path(run.config.get("ckpt_path") or "")
    places = [path, path.parent.parent] if path.name else []
    own = run.path.resolve()  # ckpt_path=logs/latest may point to this run by now
    return next((place for place in places if (place / "config.yaml").is_file() and place.resolve() != own), None)


class _Receipt:
    """The parts of a receipt, in order."""

    def __init__(self, run: RunDir, cfg: dict[str, Any], baseline: Path | None, effort: str, bar: Progress) -> None:
        self.run, self.effort, self.baseline, self.bar = run, EFFORTS[effort], baseline, bar
        self.task, self.cfg = open_run_net(run.path)
        self.net: nn.Module = self.task.net
        self.dense, self.notes = self._open_dense(baseline)
        self.quantized = facts.is_quantized(self.net)
        self.split = "test" if self.cfg["test"] else "val"  # test=false keeps the test split unseen
        gpu = cfg["trainer"]["accelerator"] in ("auto", "gpu", "cuda") and torch.cuda.is_available()
        self.devices = [CPU, torch.device("cuda")] if gpu else [CPU]
        if data_folder_of(cfg) != data_folder_of(self.cfg):  # the command has another folder, since they have moved
            set_data_folder(self.cfg, data_folder_of(cfg))
        self.data = open_data(self.cfg, self.task)
        self.first: Tensor = next(iter(self.data.eval_loader(self.split)))[0].clone()
        self.left_out: list[dict[str, str]] = []
        try:
            self.dense.net(self.sample(1))
        except RuntimeError as error:  # raised by torch for shapes that don't fit
            if baseline is None:
                raise
            raise UserError(
                f"baseline={baseline} takes inputs of another kind than this run's: give a run on the same data."
            ) from error

    def _open_dense(self, baseline: Path | None) -> tuple[Task, list[str]]:
        if baseline is None:
            return make_task(self.cfg, train=False).eval(), []
        require(
            baseline.resolve() != self.run.path.resolve(),
            f"baseline={baseline} is this run itself: name the run of the dense net.",
        )
        task, cfg = open_run_net(baseline, "baseline")
        notes = []
        if structure_of(task.net) or facts.weight_sparsity(task.net) >= facts.NOTHING:
            notes.append("The baseline is itself a compressed net: ratios are to it, not to a dense one.")
        unlike = {f"data.{line.partition(':')[0]}": line for line in differences(cfg["data"], self.cfg["data"])}
        others = data_keys(unlike)
        if others:
            notes.append(f"The baseline was trained on other data ({unlike[others[0]]}).")
        return task, notes

    def sample(self, n: int) -> Tensor:
        """Return a batch of `n` of the split's first inputs, repeated if they are fewer."""
        return self.first[torch.arange(n) % len(self.first)].clone()

    def step(self, now: str) -> None:
        """Draw the progress bar: `now` is measured next."""
        self.bar.update(self.bar.task_ids[0], advance=1, now=now, refresh=True)

    def measured(self) -> dict[str, Any]:
        """Return the whole receipt as plain data."""
        cells = [
            (where, batch, n) for where in self.devices for n in self._threads(where) for batch in self.effort.batches
        ]
        targets = 4 + len(self.effort.targets)
        timed = targets - 2 + (6 if self.effort.compiled else 3)
        self.bar.update(self.bar.task_ids[0], total=targets + timed + len(cells) * (timed + 1))
        kinds = facts.kinds_of(self.cfg)
        sample = self.sample(1)
        size = {"this": facts.sizes(self.net, sample), "dense": facts.sizes(self.dense.net, sample)}
        if self.baseline is None:  # random weights, whose zeros are meaningless
            size["dense"] |= {"non_zero": size["dense"]["parameters"], "effective_macs": size["dense"]["macs"]}
        found: dict[str, Any] = {
            "name": self.run.path.name,
            "compression": kinds,
            "structure": sorted(structure_of(self.net)),
            "baseline": str(self.baseline) if self.baseline else None,
            "split": self.split,
            "metric": self.task.monitor.rpartition("/")[2],
            "chosen": self._chosen(),
            "warnings": facts.changed_nothing(kinds, self.net),
            "size": size["this"] | {"sparsity": facts.weight_sparsity(self.net)},
            "dense": {"size": size["dense"], "trained": self.baseline is not None},
            "energy": {
                "this": facts.energy(self.run),
                "dense": facts.energy(RunDir(self.baseline) if self.baseline else None),
            },
            "layers": facts.layers(self.net, sample),
            "memory": self._memory(),
            "figure": "receipt.svg",
            "undeclared": undeclared(self.cfg["data"]),
        }
        with scratch() as folder:
            forms, found["files"] = self._forms(folder)
            ships = words.shipped(found["files"])
            found["ships"] = ships["target"] if ships else None
            found["bytes_share"] = (
                ships["share"] if ships else None
            )  # gzipped, relative to the dense net's uncompressed file
            found["figures"] = self._metrics(forms)
            found["latency"] = time_forms(forms, cells, self.sample, self.effort, self.left_out, step=self.step)
        found["left_out"] = self.left_out
        found["hardware"] = {"cpu": measure.describe_cpu(), "gpu": measure.describe_gpu(self.devices[-1])}
        found["versions"] = measure.versions()
        found["findings"] = [*words.findings(found), *self.notes]
        found["method"] = words.method(found, self.effort.warmup)
        return found

    def _chosen(self) -> dict[str, Any]:
        monitor = (self.cfg["callbacks"].get("checkpoint") or {}).get("monitor", "auto")
        by = self.task.monitor if monitor in ("auto", None) else monitor
        return {"by": by, "step": int(read_checkpoint(self.run.best)["global_step"])}

    def _threads(self, device: torch.device) -> Sequence[int]:
        cores = measure.usable_cores()
        return (1, cores) if self.effort.all_cores and cores > 1 and device == CPU else (1,)

    def _memory(self) -> list[dict[str, Any]]:
        rows = []
        for device in self.devices:
            for of, net in (("this", self.net), ("dense", self.dense.net)):
                there = net if device == CPU else facts.moved(net, device)
                for batch in self.effort.batches:
                    peak = facts.peak_memory(there, self.sample(batch).to(device))
                    rows.append({"of": of, "device": device.type, "batch": batch, "bytes": peak})
        return rows

    def _forms(self, folder: Path) -> tuple[list[Form], list[dict[str, Any]]]:
        """Return all forms to be timed, and a row for each file; failed exports are left out."""
        forms: list[Form] = []
        for device in self.devices:
            forms += [Eager("this", self.net, device), Eager("dense", self.dense.net, device)]
            forms.append(Compiled("dense", self.dense.net, torch.bfloat16, device))
            if self.effort.compiled:
                forms.append(Compiled("dense", self.dense.net, torch.float32, device))
                forms += [Compiled("this", self.net, dtype, device) for dtype in (torch.float32, torch.bfloat16)]
        targets = ("onnx_int8" if self.quantized else "onnx", "weights", *self.effort.targets)
        files: dict[tuple[str, str], measure.FileSize] = {}
        for of, net, names in (("dense", self.dense.net, ("onnx", "weights")), ("this", self.net, targets)):
            for target in names:
                self.step(f"{of} {target}, export")
                try:
                    path = export_to(target, net, self.sample(2), folder / of)
                except Exception as error:  # a failing back end must not stop the rest of the receipt
                    self.left_out.append({"form": f"{of} {target}", "reason": reason(error)})
                    continue
                files[of, target] = measure.file_size(path)
                if target != "weights":
                    forms.append(Target(of, target, path))
        forms += self._on_gpus(folder)
        return forms, [self._file_row(of, target, size, files) for (of, target), size in files.items()]

    def _on_gpus(self, folder: Path) -> list[Form]:
        """Return the AOTInductor forms for a GPU, which are timed, but are not files of the receipt."""
        forms: list[Form] = []
        for device in self.devices[1:] if "aot_inductor" in self.effort.targets else []:
            for of, net in (("this", self.net), ("dense", self.dense.net)):
                place = folder / f"{of} {device.type}"
                try:
                    path = export_to("aot_inductor", net, self.sample(2), place, device="cuda")
                except Exception as error:
                    left = f"{of} aot_inductor, {device.type}"
                    self.left_out.append({"form": left, "reason": reason(error)})
                    continue
                forms.append(Target(of, "aot_inductor", path, device))
        return forms

    def _file_row(
        self, of: str, target: str, size: measure.FileSize, files: Mapping[tuple[str, str], measure.FileSize]
    ) -> dict[str, Any]:
        dense = files.get(("dense", "weights" if target == "weights" else "onnx"))
        return {
            "of": of,
            "target": target,
            "bytes": size.bytes,
            "gzipped": size.gzipped,
            "ratio": size.bytes / dense.bytes if dense else None,
            "gzipped_ratio": size.gzipped / dense.gzipped if dense else None,
            "share": size.gzipped / dense.bytes if dense else None,
        }

    def _metrics(self, forms: Sequence[Form]) -> list[dict[str, Any]]:
        """Return metrics of the module on both splits, of each back end, and of a trained dense net."""
        reference = None
        if self.baseline is not None:
            reference = facts.Reference(
                Eager("dense", self.dense.net).open(self.sample(1), torch.get_num_threads()).forward
            )
        rows = []
        splits = ["val", self.split] if self.split != "val" else ["val"]
        for form in forms:
            skip = form.device != CPU or (form.of == "dense" and (self.baseline is None or form.backend != "eager"))
            if skip:
                continue
            self.step(f"{form.name}, metrics")
            try:
                opened = form.open(self.sample(max(self.effort.batches)), torch.get_num_threads())
                for split in splits if (form.of, form.backend) == ("this", "eager") else splits[-1:]:
                    beside = reference if form.of == "this" and split == self.split else None
                    metrics, told = facts.scored(self.task, opened.forward, self.data.eval_loader(split), beside)
                    rows.append(
                        {
                            "of": form.of,
                            "backend": form.backend,
                            "split": split,
                            "figures": metrics,
                            "agreement": asdict(told) if told else None,
                        }
                    )
            except Exception as error:
                if isinstance(form, Eager):
                    raise
                self.left_out.append({"form": f"{form.name}, figures", "reason": reason(error)})
        return rows
