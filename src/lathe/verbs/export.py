"""Export a run: load it, write each target's file, compare it in a fresh process, and keep it only if it passes."""

import json
import logging
import math
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.functional import interpolate, pad

from lathe import export, measure
from lathe.config.metric_names import without_split
from lathe.data.order import IGNORE
from lathe.errors import UserError, require, under, user_location
from lathe.export.bundle import fresh_folder, open_bundle, read_manifest, write_manifest
from lathe.export.inputs import as_list
from lathe.export.torch_runner import on_arrays
from lathe.files import scratch
from lathe.measure import AgreementMeter
from lathe.runs.build import make_data
from lathe.runs.checkpoints import KEY, checkpoint_hash
from lathe.runs.export_model import CoreModel, ExportModel, make_preprocess, open_core, open_export_model
from lathe.runs.inference import check_input_spec, is_lightning, score
from lathe.runs.rundir import RunDir, open_run
from lathe.tasks.core import core_of
from lathe.training.trainer_setup import configure_logging
from lathe.verbs.evaluate import AUTO, HERE, OpenedToFit, rebuild

# keys of the group that apply to every target
SHARED = ("preprocess", "input_size", "split", "samples", "axes", "tolerance", "agreement", "max_drop")
LOGITS = 2**25  # at most, of the held-out data (128 MiB): a limit for large vocabularies
BYTES = 2**26  # at most, of one batch: images of another size may be large
INPUTS = 2**30  # bytes of all held-out inputs, at most: they are in memory and in the temporary folder
BATCHES = (1, 2, 3, 7, 16, 33)  # batch sizes, in addition to that of the data
STEP = 1e-3  # of a pixel: division by 255 and std in float32 may differ so much from multiplication by the inverse
SECONDS = 600  # timeout of the fresh process

# Largest difference of a logit as a share of the largest logit, and least share of equal predictions, by arithmetic.
# Measured on nets of 8 to 56 layers: 3e-6 in float32 (order of summation); in integers 2e-2, or 5e-2 after channel
# pruning, since rounded biases move some activations by one step.
TOLERANCES = {"float32": (5e-5, 0.999), "float16": (2e-2, 0.99), "int8": (0.1, 0.97)}
WIDEST = 0.5  # for few bits, whose large steps leave mainly the predictions to compare
Calls = Sequence[list[Tensor]]  # the outputs of each call


def ship(cfg: dict[str, Any]) -> dict[str, Any]:
    """Export the run to each target, into its exports/<target>; return the parity reports, or raise the failures."""
    configure_logging()
    run, request, devices = RunDir(cfg["paths"]["run_dir"]), cfg["request"], cfg["trainer"]["devices"]
    shared, core = request["target"], is_lightning(run.config)
    targets = targets_of(shared)
    if not core:
        check_input_spec(run.config, request["run"])
    run.checkpoint(request["checkpoint"], "checkpoint")
    fits = shared["input_size"] is None or (shared["preprocess"] and not core)
    size = f"target.input_size={shared['input_size']}"
    require(fits, f"{size} needs target.preprocess=true and a run on images: leave it null.")
    require(core or not shared["axes"], "target.axes is for the core of a LightningModule: leave it null.")
    require(devices in (1, "auto"), f"trainer.devices={devices}: a run is exported in one process; leave it 1.")
    reports: dict[str, Any] = {}
    failed: list[UserError] = []
    for name, options in targets.items():
        try:
            reports[name] = export_to(name, options, run.path, request)
        except UserError as error:
            failed.append(error)
    if reports:
        print_table(reports, run.path)
    if failed:
        raise UserError(" ".join(map(str, failed))) from failed[0]
    return reports


def targets_of(group: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the targets of a resolved `target` group, with their options."""
    targets = {name: dict(node) for name, node in group.items() if name not in SHARED and node is not None}
    require(bool(targets), f"target is empty: choose one of {', '.join(export.TARGETS)}.")
    return targets


def export_to(name: str, options: Mapping[str, Any], run: Path, request: Mapping[str, Any]) -> dict[str, Any]:
    """Load a run, write one target's file, compare it, publish the folder, and return the parity report."""
    began, shared, path = time.monotonic(), request["target"], run / "exports" / name
    settings = {key: shared[key] for key in ("preprocess", "input_size", "axes")}
    settings |= {"checkpoint": request["checkpoint"], "eval_batch_size": request["batch_size"]}
    ready = ready_for(name, options, run, data_folder=request["data"]["folder"], **settings)
    target = get_target(name, options)
    with torch.random.fork_rng(devices=[]), torch.no_grad(), fresh_folder(path) as folder:
        facts = make(ready, name, options, folder)
        seconds = time.monotonic() - began
        report = compared(run, ready, folder, name, options, shared)
        report |= {"export_seconds": seconds, "seconds": time.monotonic() - began, "versions": measure.versions()}
        (folder / "parity.json").write_text(json.dumps(report, indent=2, allow_nan=False) + "\n")
        write_manifest(folder, facts)
        target.complete(folder)
        write_manifest(folder, facts)
    target.publish(path)
    return report


def get_target(name: str, options: Mapping[str, Any]) -> export.Target:
    """Return a target with its options; messages about them begin with their keys."""
    with under(f"target.{name}"):
        return export.get(name, **options)


def ready_for(
    name: str,
    options: Mapping[str, Any],
    run: Path,
    *,
    preprocess: bool = True,
    input_size: Any = None,
    axes: Mapping[str, Mapping[Any, str]] | None = None,
    checkpoint: str = "best",
    **shared: Any,
) -> ExportModel:
    """Build the module that target `name` exports; `shared` are further arguments of `open_export_model`."""
    target = get_target(name, options)
    missing = target.available()
    require(missing is None, str(missing))
    opened = open_run(run, "run")
    digest = checkpoint_hash(opened.checkpoint(checkpoint, "checkpoint"))  # first: training may replace the file
    shared |= {"checkpoint": checkpoint, "integers": target.integers}
    ready: ExportModel
    if is_lightning(opened.config):
        message = f"target={name} takes nets of images and tokens, not the core of a LightningModule"
        require(target.takes_cores, f"{message}: choose onnx, torch_export, aot_inductor or executorch.")
        ready = open_core(run, axes=axes, **shared)
    else:
        size = input_size if target.computes else None
        ready = open_export_model(run, preprocess=preprocess and target.computes, input_size=size, **shared)
    ready.facts[KEY] = digest
    return ready


def make(ready: ExportModel, name: str, options: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Write the file of target `name` and its manifest into `folder`, and return the manifest's entries."""
    target = get_target(name, options)
    facts = {
        "target": name,
        "file": f"model{target.suffix}",
        **ready.facts,
        "options": dict(options),
        "exported": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "versions": measure.versions(),
        **target.machine(),
    }
    target.facts, target.config = facts, ready.cfg["model"].get("net")
    disabled = logging.root.manager.disable
    logging.disable(max(disabled, logging.INFO))  # exporters log every pass over a graph
    try:
        with under(f"target.{name}"):
            whole = target.computes or not isinstance(ready, CoreModel)  # weights have the core's own names
            target.export(ready.net if whole else ready.inner, ready.example, folder / facts["file"])
    except (UserError, OSError):
        raise
    except Exception as error:  # any error of a tracer or a compiler
        cause: BaseException = error
        while cause.__cause__ is not None:  # torch's exporter has the reason there
            cause = cause.__cause__
        raise UserError(
            f"target={name} can't take this net{user_location(cause)} ({type(cause).__name__}: "
            f"{export.first_line(cause)}): choose another target; HYDRA_FULL_ERROR=1 shows where."
        ) from error
    finally:
        logging.disable(disabled)
    write_manifest(folder, facts)
    return facts


def compared(
    run: Path, ready: ExportModel, folder: Path, name: str, options: Mapping[str, Any], shared: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the parity report of target `name` in `folder`; `shared` are the keys common to all targets.

    If the run's data can't be opened, a warning says that only noise is compared, and `held_out` and `figures` are
    None. Raises UserError if the file is outside its tolerance.
    """
    split, held_data = _open_held_out(ready, name, shared["split"], shared["samples"])
    odd = ready.odd_inputs() if isinstance(ready, CoreModel) else odd_inputs(ready)
    inputs, n = [*held_data.inputs, *odd], len(held_data.inputs)
    job = {"folder": str(folder.absolute()), "run": str(run.absolute()), "threads": torch.get_num_threads()}
    kind = "values" if isinstance(ready, CoreModel) else ready.task.predicts
    try:
        references = reference_outputs(ready, inputs)
        outputs = probe_outputs(job, inputs)
        difference = compare(outputs[:n], references[:n], kind) if n else None
        strange = compare(outputs[n:], references[n:], kind)
    except UserError as error:
        raise UserError(f"target={name}: {error}, so nothing was exported.") from error
    arithmetic = arithmetic_of(ready, get_target(name, options))
    largest, least = tolerances(ready, arithmetic)
    report: dict[str, Any] = {
        "target": name,
        "split": split,
        "samples": held_data.n,
        "arithmetic": arithmetic,
        "tolerance": largest if shared["tolerance"] is None else shared["tolerance"],
        "least_agreement": least if shared["agreement"] is None else shared["agreement"],
        "held_out": difference,
        "odd_inputs": {**strange, "shapes": [list(as_list(x)[0].shape) for x in odd]},
        "fresh_process": True,
    }
    check_tolerances(report)
    if difference is None:
        return report | {"figures": None, "metric": None, "drop": None, "max_drop": None}
    if isinstance(ready, CoreModel):
        metrics = core_metrics(ready, run, folder, split, n)
    else:

        def scored(calls: Calls) -> dict[str, float]:
            following = iter(calls)
            return score(ready.task, lambda x: next(following)[0], held_data.batches)

        module = scored(references[:n])
        same = ready.inner is ready.trained and ready.other_size is None
        trained = module if same else score(ready.task, ready.trained, held_data.batches)
        metrics = {"trained": trained, "module": module, "file": scored(outputs[:n])}
    return report | metric_drop(ready, metrics, shared["max_drop"], name)


@dataclass(frozen=True)
class Held:
    """Held-out batches of the data module, and their inputs as clients send them: of a core, a tuple for each batch."""

    batches: list[Any]
    inputs: list[Any]

    @property
    def n(self) -> int:
        return sum(next((len(tensor) for tensor in as_list(x) if tensor.dim()), 1) for x in self.inputs)


def _open_held_out(ready: ExportModel, name: str, split: str, samples: int | None) -> tuple[str, Held]:
    """Return the split to compare on, and its samples; warn if there are none."""
    held_data, reason = Held([], []), "no batch has the sizes of the example"
    try:
        data = ready.data
    except UserError as error:
        reason = str(error)
    else:
        if isinstance(ready, CoreModel):
            # a LightningModule's own steps evaluate val where it or the data have no test
            own = is_overridden("test_step", ready.task.driven)
            split = split if own and is_overridden("test_dataloader", data, LightningDataModule) else "val"
            held_data = Held([], ready.held_out(split, samples))
        else:
            held_data = held_out(ready, split, samples)
    if not held_data.inputs:
        rank_zero_warn(f"target={name}: the file is compared with the module on noise alone, without data: {reason}")
    return split, held_data


def held_out(ready: ExportModel, split: str, samples: int | None) -> Held:
    """Return the first `samples` of a split, or as many as `LOGITS` and `INPUTS` allow.

    Padding rows are left out, and images are scaled to the input size of the file.
    """

    def rows(batch: tuple[Any, ...], index: Any) -> tuple[Any, ...]:
        return tuple(item[index] if torch.is_tensor(item) and item.dim() > 0 else item for item in batch)

    held_data, logits, inputs = Held([], []), 0, 0
    left = sys.maxsize if samples is None else samples
    for batch in map(tuple, ready.data.eval_loader(split)):
        targets: Any = batch[1] if len(batch) > 1 else None
        classes = torch.is_tensor(targets) and not targets.is_floating_point()
        if classes and targets.shape[:1] == batch[0].shape[:1]:
            batch = rows(batch, (targets != IGNORE).view(len(targets), -1).any(1))
        for start in range(0, len(batch[0]), most_of(ready)):
            part = rows(batch, slice(start, start + min(most_of(ready), left)))
            x = ready.inputs_of(part[0])
            if x.dtype == torch.uint8:
                own = make_preprocess(ready.cfg)
                off = (own(x) - part[0]).abs()
                message = f"the data differ by {off.max():.2g} from (pixel / 255 - data.mean) / data.std"
                fits = bool((off <= STEP * own.scale).all())
                require(fits, f"target.preprocess=true: {message}. Set target.preprocess=false.")
                if ready.other_size is not None:
                    x = inside(x, ready.other_size)
            held_data.batches.append(part)
            held_data.inputs.append(x)
            left, logits, inputs = left - len(x), logits + ready.logits_of(x), inputs + x.nbytes
            if left == 0 or logits > LOGITS or inputs > INPUTS:
                return held_data
    return held_data


def inside(x: Tensor, size: tuple[int, int]) -> Tensor:
    """Return images of `size` with `x`, scaled, in the centre that `Preprocess` crops; borders repeat."""
    ratio = min(side / own for side, own in zip(size, x.shape[2:], strict=True))
    tall, wide = (min(side, max(1, round(own * ratio))) for side, own in zip(size, x.shape[2:], strict=True))
    top, left = (size[0] - tall) // 2, (size[1] - wide) // 2
    middle = interpolate(x.float(), size=(tall, wide), mode="bilinear", antialias=True).round().clamp(0, 255)
    return pad(middle, (left, size[1] - wide - left, top, size[0] - tall - top), mode="replicate").to(torch.uint8)


def most_of(ready: ExportModel) -> int:
    """Return the largest number of rows of a batch."""
    return max(1, BYTES // ready.example[:1].numel())


def odd_inputs(ready: ExportModel) -> list[Tensor]:
    """Return noise and extreme values in batch sizes that were not traced, and in other lengths or sizes."""
    draw = torch.Generator().manual_seed(0)
    shape, spec = ready.example.shape[1:], ready.facts["input"]
    inputs = []
    for number, batch in enumerate(size for size in BATCHES if size <= max(2, most_of(ready))):
        if ready.example.dtype == torch.uint8:
            sides = list(shape[1:])
            if ready.takes_any_size:
                sides = torch.randint(1, 4 * max(sides) + 1, (2,), generator=draw).tolist() if number else [1, 1]
            inputs.append(torch.randint(0, 256, (batch, shape[0], *sides), generator=draw, dtype=torch.uint8))
            if number < 2:
                inputs.append(torch.full((batch, *shape), 255 * number, dtype=torch.uint8))
        elif ready.example.is_floating_point():
            inputs.append(torch.randn(batch, *shape, generator=draw))
        else:
            time = shape[0]
            if spec["shape"][1] == "time":
                time = int(torch.randint(1, time + 1, (), generator=draw)) if number else 1
            inputs.append(torch.randint(0, spec["vocab_size"], (batch, time), generator=draw))
    return inputs


@torch.no_grad()
def reference_outputs(ready: ExportModel, inputs: Sequence[Any]) -> list[list[Tensor]]:
    """Return the module's outputs for each call; raise UserError for nan, inf or random numbers."""

    def call(x: Any) -> list[Tensor]:  # a core may write into its input
        return [_wide(output) for output in as_list(ready.net(*(tensor.clone() for tensor in as_list(x))))]

    results = [call(x) for x in inputs]
    for x, outputs in zip(inputs, results, strict=True):
        shape = list(as_list(x)[0].shape)
        finite = all(bool(output.isfinite().all()) for output in outputs)
        require(finite, f"the run's own net answers an input of shape {shape} with nan or inf")
    again = call(inputs[0]) if isinstance(ready, CoreModel) else results[0]
    same = all(torch.equal(*pair) for pair in zip(results[0], again, strict=True))
    require(same, f"model.core: {type(ready.inner).__name__} draws random numbers: name a submodule that does not")
    return results


def _wide(output: Tensor) -> Tensor:
    return output.float() if output.is_floating_point() else output


def probe_outputs(job: Mapping[str, Any], inputs: Sequence[Any]) -> list[list[Tensor]]:
    """Return the outputs of each call of `lathe.verbs.export_probe`, a fresh process; raise UserError if it fails."""
    with scratch() as folder:
        (folder / "job.json").write_text(json.dumps(job))
        for number, x in enumerate(inputs):
            np.savez(folder / f"in_{number}.npz", *(tensor.numpy() for tensor in as_list(x)))
        _run([sys.executable, "-m", "lathe.verbs.export_probe", str(folder)])
        results = []
        for number in range(len(inputs)):
            with np.load(folder / f"out_{number}.npz") as file:
                results.append([_wide(torch.from_numpy(array)) for array in file.values()])
        return results


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)  # our own module  # noqa: S603
    except subprocess.TimeoutExpired as error:
        raise UserError(f"a fresh process did not answer within {SECONDS} seconds") from error
    lines = [line for line in done.stderr.splitlines() if line.strip()] or [f"exit code {done.returncode}"]
    require(not done.returncode, f"a fresh process could not run the file ({lines[-1][:300].rstrip('.')})")


def compare(outputs: Calls, references: Calls, predicts: str) -> dict[str, Any]:
    """Return the `largest` difference of a file's outputs from the module's, `references`.

    `relative` is its share of `scale`, the largest logit; a nan makes it nan. `agreement` is the share of equal
    predictions among `n`, None for values; of integers and booleans, the share of equal ones. Of several outputs the
    worst counts. Raises UserError if an output has another shape.
    """
    differences, shares = [], []
    for mine, other in zip(zip(*outputs, strict=True), zip(*references, strict=True), strict=True):
        for own, wanted in zip(mine, other, strict=True):
            shapes = list(own.shape), list(wanted.shape)
            require(shapes[0] == shapes[1], f"an output has shape {shapes[0]} instead of {shapes[1]}")
        if other[0].is_floating_point():
            meter = AgreementMeter(predicts)
            for own, wanted in zip(mine, other, strict=True):
                meter.add(own, wanted)
            largest, n = meter.result.largest, meter.result.n
            scale = max(float(wanted.abs().max()) for wanted in other)
            shares.append(meter.result.share)
        else:
            equal = torch.cat([(own == wanted).flatten() for own, wanted in zip(mine, other, strict=True)])
            largest, scale, n = 0.0, 1.0, len(equal)
            shares.append(float(equal.double().mean()))
        relative = largest / scale if scale else largest
        differences.append({"largest": largest, "scale": scale, "relative": relative, "n": n})
    worst = max(differences, key=lambda each: math.inf if math.isnan(each["relative"]) else each["relative"])
    return {**worst, "agreement": min((share for share in shares if share is not None), default=None)}


def arithmetic_of(ready: ExportModel, target: export.Target) -> str:
    """Return the arithmetic of the file; weight-only integers are dequantized to floats."""
    if ready.activation_bits is not None:
        return "int8"
    return "float16" if target.half else "float32"


def tolerances(ready: ExportModel, arithmetic: str) -> tuple[float, float]:
    """Return the largest difference and the least agreement; fewer than 8 bits have larger steps."""
    largest, least = TOLERANCES[arithmetic]
    if arithmetic == "int8" and ready.activation_bits is not None:
        largest = min(largest * 255 / (2**ready.activation_bits - 1), WIDEST)
    return largest, least


def check_tolerances(report: Mapping[str, Any]) -> None:
    """Raise UserError for a report outside its tolerance; a difference of nan always is."""
    start, most, least = f"target={report['target']}:", report["tolerance"], report["least_agreement"]
    for what in ("held_out", "odd_inputs"):
        relative = 0.0 if report[what] is None else report[what]["relative"]
        require(
            relative <= most,
            f"{start} logits on {what.replace('_', '-')} data differ from the module's by {relative:.2g} of the "
            f"largest, above the tolerance of {most:g}, so nothing was exported; target.tolerance=<share> allows more.",
        )
    agreement = report["held_out"] and report["held_out"]["agreement"]
    message = (
        f"{agreement or 0:.4f} of the held-out predictions equal the module's, below {least}, so nothing was exported"
    )
    enough = agreement is None or agreement >= least  # None: values instead of classes, or no held-out data
    require(enough, f"{start} {message}; target.agreement=<share> allows less.")


def core_metrics(ready: CoreModel, run: Path, folder: Path, split: str, batches: int) -> dict[str, dict[str, float]]:
    """Return what the LightningModule's own steps log on the first `batches` of a split.

    They are of its core as trained, of the exported module and of the file in the core's place; {} without such a step.
    """
    step = "test_step" if split == "test" else "validation_step"
    name = read_manifest(folder)["target"]
    if not export.get(name).computes or not is_overridden(step, ready.task.driven):
        return {"trained": {}, "module": {}, "file": {}}
    cfg = {**ready.cfg, "trainer": {**ready.cfg["trainer"], **HERE, "accelerator": "cpu"}, "strategy": AUTO}
    task, trainer = rebuild({**cfg, "request": {"checkpoint": ready.facts["checkpoint"]}})
    core: Any = core_of(task.net)
    if split == "val":
        trainer.callbacks.append(OpenedToFit())  # type: ignore[attr-defined]  # a connector sets it
    trainer.limit_val_batches = trainer.limit_test_batches = batches
    evaluate = trainer.test if split == "test" else trainer.validate

    def of(run: Any) -> dict[str, float]:
        if run is not None:
            core.forward = ready.replacement(run)
        evaluate(task.driven, datamodule=make_data(cfg), verbose=False)
        return {name: float(value) for name, value in trainer.callback_metrics.items()}

    trained = of(None)
    try:
        module = trained if ready.inner is ready.trained else of(on_arrays(ready.net))
        return {"trained": trained, "module": module, "file": of(open_bundle(folder).run)}
    except Exception as error:  # the module's own code with a file of fixed sizes, or calls of several kinds
        what = f"{type(task.net).__name__}.{step} can't run with the file in the place of {type(core).__name__}"
        rank_zero_warn(f"target={name}: {what} ({export.first_line(error)}), so its metric is not compared.")
        return {"trained": trained, "module": {}, "file": {}}


def metric_drop(
    ready: ExportModel, metrics: Mapping[str, Mapping[str, float]], most: float | None, name: str
) -> dict[str, Any]:
    """Return the metrics, the one that is checked, and its relative drop from the run's net to the file.

    The drop is the cost of calibration and of other arithmetic; it is checked unless the file has another input size.
    """
    metric, minimised = ready.task.monitor.rpartition("/")[2], ready.task.minimised
    if isinstance(ready, CoreModel):
        checkpoint = (ready.cfg.get("callbacks") or {}).get("checkpoint") or {}
        monitor = without_split(checkpoint.get("monitor") or "")
        metric = next((name for name in metrics["trained"] if monitor and without_split(name) == monitor), "")
        minimised = (metric,) if checkpoint.get("mode") == "min" else ()

    def finite(value: float) -> float | None:  # JSON has no others
        return value if math.isfinite(value) else None

    figures = {which: {key: finite(value) for key, value in values.items()} for which, values in metrics.items()}
    if metric not in metrics["file"]:
        print(f"target={name}: no metric was compared, since callbacks.checkpoint.monitor names none of this split.")
        return {"figures": figures, "metric": None, "drop": None, "max_drop": None}
    if metric == "loss" and "perplexity" in ready.task.computed:
        metric = "perplexity"  # a loss may be nearly 0, which makes a relative drop meaningless
    own, exported = metrics["trained"][metric], metrics["file"][metric]
    worse = exported - own if metric in minimised else own - exported
    drop = worse / abs(own) if own else worse
    most = None if ready.other_size is not None else most
    fix = "train with compression=qat, or raise it" if ready.facts["calibrated"] else "raise it"
    require(
        most is None or drop <= most,
        f"target={name}: {metric} on held-out data is {exported:.4f} and that of the run's own net {own:.4f}, worse by "
        f"{drop:.2g} of it, above target.max_drop={most}, so nothing was exported: choose another target, {fix}.",
    )
    return {"figures": figures, "metric": metric, "drop": finite(drop), "max_drop": most}


def print_table(reports: Mapping[str, Any], run: Path) -> None:
    """Print a line for each target, within 80 columns.

    `differ by` is the largest difference of a logit as a share of the largest logit.
    """
    first = next(iter(reports.values()))
    what = f"{first['metric']} on " if first["metric"] else ""
    title = f"Exports: {what}{first['samples']} held-out samples ({first['split']})"
    table = Table(title=title if first["held_out"] else "Exports: compared on noise only", title_justify="left")
    for column in ("target", "in", "run", "file", "equal\npredictions", "logits\ndiffer by"):
        table.add_column(column, justify="left" if column in ("target", "in") else "right")
    changed = []
    for name, report in reports.items():
        metric, figures = report["metric"], report["figures"] or {}
        values = [figures[which][metric] for which in ("trained", "file")] if metric else []
        metrics = ["inf" if value is None else f"{value:.4f}" for value in values] or ["-", "-"]
        difference = report["held_out"] or report["odd_inputs"]
        equal = "-" if difference["agreement"] is None else f"{difference['agreement']:.2%}"
        table.add_row(name, report["arithmetic"], *metrics, equal, f"{difference['relative']:.1e}")
        if figures and figures["trained"] != figures["module"] != {}:
            changed.append(name)
    console = Console()
    console.print(table)
    if changed:
        reasons = "by calibration, another input size or floats in place of integers"
        note = f"the export changed the net ({reasons}): equal predictions compare the file with that net"
        console.print(f"{', '.join(changed)}: {note}.", highlight=False)
    for name in reports:
        console.print(f"{run / 'exports' / name}", soft_wrap=True, highlight=False)
