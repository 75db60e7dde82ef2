"""The suite `inference`: a finished run's exports and its module in turns in one process, on the same inputs."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lathe import export, measure
from lathe.benchmark.forms import Bundled, arithmetic, guard
from lathe.benchmark.spread import table
from lathe.errors import UserError, did_you_mean, require
from lathe.export import manifest as manifests
from lathe.files import disk_sentence, scratch, write_atomically
from lathe.receipt import kept, runtimes, words
from lathe.receipt.forms import CPU, Compiled, Eager, Form, reason
from lathe.receipt.timing import time_forms
from lathe.runs.export_model import ExportModel, open_export_model
from lathe.runs.export_staleness import is_outdated
from lathe.runs.rundir import RunDir, open_run
from lathe.verbs.export import make, ready_for
from lathe.verbs.export import targets_of as options_of
from lathe.verbs.export_parity import arithmetic_of, odd_inputs

ARCHIVES = ("torchserve",)  # they contain another target's file, which is measured itself
BESIDE = {"eager": "this eager", "bf16": "this compiled_bf16"}


@dataclass(frozen=True)
class Limits:
    """The most timed calls of each form, warm-up calls, and seconds of a cell."""

    repeats: int
    warmup: int
    seconds: float


def targets_of(given: Sequence[str] | None, configured: Sequence[str]) -> list[str]:
    """Return the `given` targets, or all that compute and have a file in configs/target."""
    for name in given or ():
        require(name in export.TARGETS and name in configured, f"targets={name}: {did_you_mean(name, configured)}")
        require(name not in ARCHIVES, f"targets={name} holds another target's file: name that one.")
        require(
            export.get(name).computes,
            f"targets={name} holds weights alone, which compute nothing without their net: leave it out.",
        )
    return list(
        given or (name for name in export.TARGETS if name in configured and name not in ARCHIVES and _computes(name))
    )


def _computes(name: str) -> bool:
    try:
        return export.get(name).computes
    except ImportError:
        return True  # the missing package is reported when the file is made


def check_overrides(given: Sequence[str], targets: Sequence[str]) -> list[str]:
    """Return these overrides, which must be options of `targets`."""
    for text in given:
        fits = any(str(text).lstrip("+~").startswith(f"target.{name}.") for name in targets)
        require(
            fits,
            f"overrides={text}: suite=inference takes options of its targets, such as "
            "'overrides=[\"target.aot_inductor.integers=true\"]'.",
        )
    return [str(text) for text in given]


@torch.no_grad()
def compare(
    request: dict[str, Any], group: Mapping[str, Any], output: Path, tell: Callable[[str], None] = print
) -> dict[str, Any]:
    """Measure the run in all its forms, write the results into `output` and the receipt, and return them.

    `group` is the resolved `target` group of an export.
    """
    run, options, threads = open_run(request["run"], "run"), options_of(group), torch.get_num_threads()
    run.checkpoint("best")
    require(
        not run.busy, f"run={request['run']} is being written to by another process: wait for it, or stop it first."
    )
    began = time.monotonic()
    try:
        with torch.random.fork_rng(devices=[]), scratch() as folder:
            anew = {str(text).lstrip("+~").split(".")[1] for text in request["overrides"]}
            found = _Comparison(run, request, options, anew, folder, tell).measured()
    finally:
        torch.set_num_threads(threads)
    found["seconds"] = time.monotonic() - began
    write(output, found, request, tell)
    with run.locked():
        require(
            found["checkpoint"] == kept.fingerprint(run),
            f"run={request['run']} was trained on meanwhile: measure again.",
        )
        if kept.feed(run, found):
            tell(f"The receipt has it too: {run.path / 'receipt.md'}")
    return found


@dataclass
class _Comparison:
    run: RunDir
    request: dict[str, Any]
    options: dict[str, dict[str, Any]]
    anew: set[str]  # targets with options on the command line, which differ from the run's export
    folder: Path
    tell: Callable[[str], None]
    left_out: list[dict[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def measured(self) -> dict[str, Any]:
        """Return the comparison as plain data."""
        checkpoint = kept.fingerprint(self.run)
        trained = open_export_model(self.run.path)
        plain = open_export_model(self.run.path, integers=False) if trained.facts["integers"] else trained
        if plain is not trained:
            self.notes.append(
                "eager and compiled run the rounded weights as floats, for simulated integers are slower than any "
                "runtime's."
            )
        first = self._inputs(trained)
        modules: list[Form] = [Eager("this", plain.net, CPU, dtype) for dtype in (torch.float32, torch.bfloat16)]
        modules += [Compiled("this", plain.net, dtype) for dtype in (torch.float32, torch.bfloat16)]
        files = [form for form in (self._file(name, plain.facts) for name in self.options) if form is not None]

        def sample(n: int) -> Tensor:
            return first[torch.arange(n) % len(first)].clone()

        forms = {form.backend: form for form in [*modules, *files]}
        cells = [(CPU, batch, threads) for threads in self.request["threads"] for batch in self.request["batches"]]
        limits = Limits(self.request["rounds"], self.request["warmup"], self.request["seconds"])
        rows = time_forms(
            list(forms.values()),
            cells,
            sample,
            limits,
            self.left_out,
            lambda form: BESIDE,
            guard(plain, trained, sample),
        )
        for row in rows:
            form = forms[row["backend"]]
            row["arithmetic"] = arithmetic(form)
            if isinstance(form, Bundled):
                row["device"] = form.runs_on
            row["samples_per_s"] = row["batch"] / row["median_ms"] * 1e3
            row["bytes"], row["source"] = (form.bytes, form.source) if isinstance(form, Bundled) else (None, "module")
        require(
            bool(rows),
            f"run={self.request['run']}: nothing could be measured "
            f"({self.left_out[0]['reason'] if self.left_out else ''}).",
        )
        self.notes += words.busy(rows, "this", "python scripts/benchmark.py suite=inference run=<run directory>")
        away = sorted(form.backend for form in files if form.runs_on != "cpu")
        if away:
            self.notes.append(f"On a GPU, with the copies there and back in its time: {', '.join(away)}.")
        made = sorted(form.backend for form in files if form.source == "made")
        if made:
            self.notes.append(
                f"Made for this comparison and not kept: {', '.join(made)}; scripts/export.py ships them."
            )
        return {
            "run": self.run.path.name,
            "checkpoint": checkpoint,
            "measured": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "winners": runtimes.winners(rows),
            "rows": rows,
            "left_out": _told_once(self.left_out, len(cells)),
            "notes": self.notes,
            "hardware": {"cpu": measure.describe_cpu()},
            "versions": measure.versions(),
        }

    def _inputs(self, trained: ExportModel) -> Tensor:
        """Return held-out samples as clients send them, or noise if the run's data can't be opened."""
        try:
            split = "test" if trained.cfg["test"] else "val"
            return trained.inputs_of(next(iter(trained.data.eval_loader(split)))[0])
        except UserError as error:
            note = f"Inputs are noise, not held-out samples, for {error}"
            self.notes.append(note)
            self.tell(note)
            return max(odd_inputs(trained), key=len)

    def _file(self, name: str, facts: Mapping[str, Any]) -> Bundled | None:
        """Return the run's own export if it matches the module, else a new one; None if that fails."""
        shipped = self.run.path / "exports" / name
        try:
            if name not in self.anew and (shipped / manifests.NAME).is_file():
                differs = _differs(self.run, manifests.read(shipped, "targets"), facts)
                if differs is None:
                    self.tell(f"{name}: exports/{name}")
                    return Bundled(
                        shipped, "shipped", str(json.loads((shipped / "parity.json").read_text())["arithmetic"])
                    )
                self.notes.append(f"{name} was made anew, for exports/{name} {differs}.")
            began = time.monotonic()
            options, folder = self.options[name], self.folder / name
            folder.mkdir()
            ready = ready_for(name, options, self.run.path)
            make(ready, name, options, folder)
            self.tell(f"{name}: made in {time.monotonic() - began:.1f} s")
            return Bundled(folder, "made", arithmetic_of(ready, options))
        except Exception as error:  # one failing target must not hide the others
            sentence = (disk_sentence(error) if isinstance(error, OSError) else None) or reason(error)
            self.left_out.append({"form": name, "reason": sentence})
            self.tell(f"{name}: {sentence}")
            return None


def _told_once(left_out: Sequence[dict[str, str]], cells: int) -> list[dict[str, str]]:
    """Merge entries that are the same for each batch size and number of threads."""
    keys = [(entry["form"].removeprefix("this ").partition(",")[0], entry["reason"]) for entry in left_out]
    found = []
    for entry, key in zip(left_out, keys, strict=True):
        told = {"form": key[0], "reason": key[1]} if keys.count(key) == cells else entry
        found += [told] if told not in found else []
    return found


def _differs(run: RunDir, manifest: Mapping[str, Any], facts: Mapping[str, Any]) -> str | None:
    """Return the difference between a shipped file and the best checkpoint or its inputs, as a clause; None if none."""
    if manifest["checkpoint"] != "best":
        return f"is of {manifest['checkpoint']}.ckpt"
    if is_outdated(run, manifest):
        return "is of an earlier best.ckpt"
    there, here = manifest["input"]["shape"], facts["input"]["shape"]
    if there != here:
        return f"takes inputs of {there} instead of {here}"
    return None


def write(output: Path, found: Mapping[str, Any], request: Mapping[str, Any], tell: Callable[[str], None]) -> None:
    """Print the table and its conclusions, and write results.json, results.md and plot.svg into `output`."""
    cpu = found["hardware"]["cpu"]
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    text = "\n".join(
        [
            table(*runtimes.table(found["rows"])),
            *(f"- {sentence}" for sentence in runtimes.sentences(found)),
            f"\nRun {found['run']}, best.ckpt of step {found['checkpoint']['step']}. {cpu['name']}, {cpu['cores']} "
            f"cores, {', '.join(cpu['instruction_sets'])}; {versions}. All forms take the inputs that clients send, in "
            f"one process and in turns: at most {request['rounds']} rounds or {request['seconds']:g} s for a batch "
            "size and number of threads; medians of n calls.\n",
        ]
    )
    output.mkdir(parents=True, exist_ok=True)
    write_atomically(output / "results.md", text)
    write_atomically(output / "plot.svg", runtimes.figure(found["rows"]))
    write_atomically(output / "results.json", json.dumps({"request": request, **found}, indent=2) + "\n")
    tell(f"\n{text}\nWritten to {output}")
