"""suite=inference: a finished run's exports and its module in turns in one process, on the same inputs."""

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lathe import export, measure
from lathe.errors import UserError, did_you_mean, require
from lathe.export.bundle import MANIFEST, open_bundle, read_manifest
from lathe.files import scratch, write_atomically
from lathe.measure import plot
from lathe.receipt import measured, page
from lathe.receipt.measured import CPU, Form, Module, Opened, reason, time_forms
from lathe.runs.checkpoints import is_outdated
from lathe.runs.export_model import ExportModel, open_export_model
from lathe.runs.rundir import RunDir, open_run
from lathe.verbs.export import arithmetic_of, make, odd_inputs, ready_for
from lathe.verbs.export import targets_of as options_of
from suites.results import table
from suites.runner import report

ARCHIVES = ("torchserve",)  # they contain another target's file, which is measured itself
REFERENCES = {"eager": "this eager", "bf16": "this compiled_bf16"}  # every row is compared with them
CHECKED, LOGITS = 32, 2**24  # samples, and logits at most, on which a form's outputs are checked
# Largest difference from the module's logits, as a share of their norm. scripts/export.py is stricter.
LATENCY = ("median_ms", "p10_ms", "p90_ms", "n")
LOOSE = {"float32": 1e-2, "bfloat16": 0.1, "float16": 0.1, "int8": 0.3}


class Bundled(Form):
    """An export in a folder. `source` is the file's origin, `arithmetic` its number format."""

    def __init__(self, folder: Path, source: str, arithmetic: str) -> None:
        manifest = read_manifest(folder, "targets")
        super().__init__("this", str(manifest["target"]))
        self.folder, self.source, self.arithmetic = folder, source, arithmetic
        self.integers = bool(manifest["integers"])
        self.runs_on = str(manifest.get("compiled_for", {}).get("device", "cpu"))
        self.bytes = int(manifest["files"][manifest["file"]]["bytes"])

    def open(self, x: Any, threads: int) -> Opened:
        bundle, inputs = open_bundle(self.folder, threads, "targets"), x.numpy()
        forward = lambda batch: torch.from_numpy(np.asarray(bundle(batch.numpy()))).float()  # noqa: E731
        return Opened(lambda: bundle(inputs), forward)


def targets_of(names: Sequence[str] | None, configured: Sequence[str]) -> list[str]:
    """Return the targets of these names, or all that compute and have a file in configs/target."""
    for name in names or ():
        require(name in export.TARGETS and name in configured, f"targets={name}: {did_you_mean(name, configured)}")
        require(name not in ARCHIVES, f"targets={name} holds another target's file: name that one.")
        require(export.get(name).computes, f"targets={name} holds only weights, without a net. Leave it out.")
    return list(names or (name for name in export.TARGETS if name in configured and _is_measured(name)))


def _is_measured(name: str) -> bool:
    try:
        return name not in ARCHIVES and export.get(name).computes
    except ImportError:
        return True  # the missing package is reported when the file is made


def check_overrides(overrides: Sequence[str], targets: Sequence[str]) -> list[str]:
    """Return these overrides, which must be options of `targets`."""
    for text in overrides:
        fits = any(str(text).lstrip("+~").startswith(f"target.{name}.") for name in targets)
        require(fits, f"overrides={text}: suite=inference takes options of its targets: target.<name>.<key>=<value>.")
    return [str(text) for text in overrides]


@torch.no_grad()
def compare(request: Mapping[str, Any], group: Mapping[str, Any], output: Path) -> dict[str, Any]:
    """Measure the run in all its forms, write the results into `output` and the receipt, and return them.

    `group` is the resolved `target` group of an export.

    Raises:
        UserError: the run is being written to, or nothing could be measured.
    """
    run, threads, began = open_run(request["run"], "run"), torch.get_num_threads(), time.monotonic()
    counts = request["threads"] or [1, measure.usable_cores()]
    counts = counts if isinstance(counts, list) else [counts]
    request = {**request, "threads": sorted({*counts}), "batches": sorted({*request["batches"]})}
    require(not run.busy, f"run={request['run']} is being written to by another process. Wait for it, or stop it.")
    try:
        with torch.random.fork_rng(devices=[]), scratch() as folder:
            comparison = _measure(run, request, options_of(group), folder)
    finally:
        torch.set_num_threads(threads)
    comparison["seconds"] = time.monotonic() - began
    write(output, comparison, request)
    with run.locked():
        current = comparison["checkpoint"] == measured.fingerprint(run)
        require(current, f"run={request['run']} was trained on. Measure again.")
        if measured.add_comparison(run, comparison):
            report(f"The receipt has it too: {run.path / 'receipt.md'}")
    return comparison


def _measure(run: RunDir, request: Mapping[str, Any], options: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the comparison as plain data."""
    left_out, notes = list[dict[str, str]](), list[str]()
    checkpoint, trained = measured.fingerprint(run), open_export_model(run.path)
    plain = trained
    if trained.facts["integers"]:
        plain = open_export_model(run.path, integers=False)
        notes.append("eager and compiled run the rounded weights as floats: simulated integers are slower.")
    try:
        first = inputs_of(trained)
    except UserError as error:
        notes.append(f"Inputs are noise, not held-out samples, for {error}")
        report(notes[-1])
        first = max(odd_inputs(trained), key=len)

    def sample(n: int) -> Tensor:
        return first[torch.arange(n) % len(first)].clone()

    ways = [(bf16, compiled) for compiled in (False, True) for bf16 in (False, True)]
    modules = [Module("this", plain.net, CPU, bf16, compiled) for bf16, compiled in ways]
    files = list[Bundled]()
    for name in options:
        changed = any(str(text).lstrip("+~").startswith(f"target.{name}.") for text in request["overrides"])
        try:
            file, note = _open_file(name, run, options[name], plain.facts, folder / name, changed)
        except Exception as error:  # one failing target must not hide the others
            left_out.append({"form": name, "reason": reason(error)})
            report(f"{name}: {reason(error)}")
        else:
            files, notes = [*files, file], [*notes, *note]
    forms = {form.backend: form for form in [*modules, *files]}
    cells = [(CPU, batch, threads) for threads in request["threads"] for batch in request["batches"]]
    rows = time_forms(
        list(forms.values()),
        cells,
        sample,
        (request["rounds"], request["warmup"], request["seconds"]),
        left_out,
        lambda form: REFERENCES,
        _output_check(plain, trained, sample),
    )
    require(
        bool(rows), f"run={request['run']}: nothing could be measured ({[*left_out, {'reason': ''}][0]['reason']})."
    )
    for row in rows:
        form = forms[row["backend"]]
        row |= {"arithmetic": _arithmetic(form), "samples_per_s": row["batch"] / row["median_ms"] * 1e3}
        row |= {"bytes": None, "source": "module"}
        if isinstance(form, Bundled):
            row |= {"bytes": form.bytes, "source": form.source, "device": form.runs_on}
    notes += page.busy(rows, "this", "python scripts/benchmark.py suite=inference run=<run directory>")
    if away := sorted(form.backend for form in files if form.runs_on != "cpu"):
        notes.append(f"On a GPU, with the copies there and back in its time: {', '.join(away)}.")
    if unshipped := sorted(form.backend for form in files if form.source == "made"):
        notes.append(f"Made for this comparison and not kept: {', '.join(unshipped)}; scripts/export.py ships them.")
    return {
        "run": run.path.name,
        "checkpoint": checkpoint,
        "measured": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "winners": winners(rows),
        "rows": rows,
        "left_out": _without_repeats(left_out, len(cells)),
        "notes": notes,
        "hardware": {"cpu": measure.describe_cpu()},
        "versions": measure.versions(),
    }


def inputs_of(model: ExportModel) -> Tensor:
    """Return held-out samples as clients send them.

    Raises:
        UserError: the run's data can't be opened.
    """
    split = "test" if model.cfg["test"] else "val"
    return model.inputs_of(next(iter(model.data.eval_loader(split)))[0])


def _open_file(
    name: str, run: RunDir, options: Mapping[str, Any], facts: Mapping[str, Any], folder: Path, changed: bool
) -> tuple[Bundled, list[str]]:
    """Return the run's own export if it matches the module of `facts`, else a new one in `folder` with a note.

    With `changed` the options differ from those of the run's export.
    """
    shipped, notes = run.path / "exports" / name, list[str]()
    if not changed and (shipped / MANIFEST).is_file():
        stale = _explain_stale(run, read_manifest(shipped, "targets"), facts)
        if stale is None:
            report(f"{name}: exports/{name}")
            parity = json.loads((shipped / "parity.json").read_text())
            return Bundled(shipped, "shipped", str(parity["arithmetic"])), notes
        notes.append(f"{name} was made again: exports/{name} {stale}.")
    began = time.monotonic()
    folder.mkdir()
    ready = ready_for(name, options, run.path)
    make(ready, name, options, folder)
    report(f"{name}: made in {time.monotonic() - began:.1f} s")
    return Bundled(folder, "made", arithmetic_of(ready, export.get(name, **options))), notes


def _explain_stale(run: RunDir, manifest: Mapping[str, Any], facts: Mapping[str, Any]) -> str | None:
    """Return the difference between a shipped file and the best checkpoint or its inputs, as a clause; None if none."""
    if manifest["checkpoint"] != "best":
        return f"is of {manifest['checkpoint']}.ckpt"
    if is_outdated(run, manifest):
        return "is of an earlier best.ckpt"
    shape, wanted = manifest["input"]["shape"], facts["input"]["shape"]
    return None if shape == wanted else f"takes inputs of {shape} instead of {wanted}"


def _arithmetic(form: Form) -> str:
    return form.arithmetic if isinstance(form, Bundled) else "bfloat16" if form.backend.endswith("bf16") else "float32"


def _output_check(
    plain: ExportModel, trained: ExportModel, sample: Callable[[int], Tensor]
) -> Callable[[Form, Opened], None]:
    """Return a check of a form's logits against `plain`, or for files with integers against `trained`."""
    x = sample(max(1, min(CHECKED, LOGITS // plain.logits_of(sample(1)))))
    references = {integers: model.net(x).float() for integers, model in ((False, plain), (True, trained))}

    def check(form: Form, opened: Opened) -> None:
        limit = LOOSE[_arithmetic(form)]
        reference, answer = references[isinstance(form, Bundled) and form.integers], opened.forward(x)
        require(answer.shape == reference.shape, f"wrong: its outputs are {[*answer.shape]}, not {[*reference.shape]}.")
        distance = float((answer - reference).norm() / reference.norm().clamp_min(1e-12))
        if not distance <= limit:  # also for nan
            raise UserError(
                f"wrong: its logits differ from the module's by {distance:.2g} of their norm, more than {limit:g}."
            )

    return check


def _without_repeats(left_out: Sequence[dict[str, str]], cells: int) -> list[dict[str, str]]:
    """Merge entries that are the same for each batch size and number of threads."""
    keys = [(entry["form"].removeprefix("this ").partition(",")[0], entry["reason"]) for entry in left_out]
    entries = []
    for entry, key in zip(left_out, keys, strict=True):
        merged = {"form": key[0], "reason": key[1]} if keys.count(key) == cells else entry
        entries += [merged] if merged not in entries else []
    return entries


def winners(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the `fastest` row's name for each batch size and number of threads.

    `winner` is None if others are equal within noise (`same`); `file` is the fastest exported file.
    """
    cells, cell = [], itemgetter("batch", "threads")
    for (batch, threads), group in groupby(sorted(rows, key=cell), cell):
        ranked = sorted(group, key=lambda row: float(row["median_ms"]))
        best = ranked[0]
        fastest, *others = (measure.Latency(*(row[key] for key in LATENCY)) for row in ranked)
        same = [row for row, other in zip(ranked[1:], others, strict=True) if measure.verdict(fastest, other) == "same"]
        file = next((row for row in ranked if row["bytes"] is not None), None)
        names = [f"{row['backend']} ({row['median_ms']:.3f} ms)" for row in (best, *same)]
        text = f"Batch {batch}, {threads} thread{'s' * (threads > 1)}: "
        text += f"no winner, {' and '.join(names)} are the same within noise" if same else f"{names[0]} is the fastest"
        if best["over_eager"] is not None and best["backend"] != "eager":
            text += f", {best['over_eager']:.2f} of eager's time"
        if file is not None and file is not best and file not in same:
            text += f"; of the files, {file['backend']} is the fastest with {file['median_ms']:.3f} ms"
        cells.append(
            {
                **{"batch": batch, "threads": threads, "fastest": best["backend"]},
                "winner": None if same else best["backend"],
                "same": [row["backend"] for row in same],
                "file": file["backend"] if file else None,
                "sentence": f"{text}.",
            }
        )
    return cells


def runtime_figure(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return an SVG of the speed relative to eager by batch size, one plot for each number of threads."""
    plots = []
    for threads in sorted({row["threads"] for row in rows}):
        series: dict[str, list[tuple[float, float]]] = {}
        for row in sorted(rows, key=itemgetter("batch")):
            if row["threads"] == threads and row["over_eager"]:
                series.setdefault(row["backend"], []).append((float(row["batch"]), 1 / row["over_eager"]))
        title = f"Speed over eager's, {threads} thread{'s' * (threads > 1)}"
        plots.append(plot.lines(title, "batch", "times eager", series))
    return plot.beside(plots)


def write(output: Path, section: Mapping[str, Any], request: Mapping[str, Any]) -> None:
    """Print the table and its conclusions, and write results.json, results.md and plot.svg into `output`."""
    cpu = section["hardware"]["cpu"]
    versions = ", ".join(f"{name} {version}" for name, version in section["versions"].items())
    under = (
        f"\nRun {section['run']}, best.ckpt of step {section['checkpoint']['step']}. {cpu['name']}, {cpu['cores']} "
        f"cores, {', '.join(cpu['instruction_sets'])}; {versions}. All forms take the inputs that clients send, in one "
        f"process and in turns: at most {request['rounds']} rounds or {request['seconds']:g} s for a batch size and "
        "number of threads; medians of n calls.\n"
    )
    sentences = [f"- {sentence}" for sentence in page.runtime_sentences(section)]
    text = "\n".join([table(*page.runtime_table(section["rows"])), *sentences, under])
    output.mkdir(parents=True, exist_ok=True)
    write_atomically(output / "results.md", text)
    write_atomically(output / "plot.svg", runtime_figure(section["rows"]))
    write_atomically(output / "results.json", json.dumps({"request": request, **section}, indent=2) + "\n")
    report(f"\n{text}\nWritten to {output}")
