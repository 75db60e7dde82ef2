"""The parity report of an export: its file, run in a fresh process, against the module, on held-out and odd inputs."""

import json
import math
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.nn.functional import interpolate, pad

from lathe import export
from lathe.config.metric_names import without_split
from lathe.data.order import IGNORE
from lathe.errors import UserError, require
from lathe.export import manifest as manifests
from lathe.export.bundle import open_bundle
from lathe.export.inputs import as_list
from lathe.export.torch_runner import on_arrays
from lathe.files import scratch
from lathe.measure import AgreementMeter
from lathe.runs.build import make_data
from lathe.runs.export_model import CoreModel, ExportModel, make_preprocess
from lathe.runs.inference import score
from lathe.tasks.core import core_of
from lathe.verbs.evaluate import AUTO, HERE, OpenedToFit, rebuild

PROBE = "lathe.verbs.export_probe"
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


@dataclass(frozen=True)
class Held:
    """Held-out batches of the data module, and their inputs as clients send them: of a core, a tuple for each batch."""

    batches: list[Any]
    inputs: list[Any]

    @property
    def n(self) -> int:
        return sum(next((len(tensor) for tensor in as_list(x) if tensor.dim()), 1) for x in self.inputs)


def compared(
    run: Path, ready: ExportModel, folder: Path, name: str, options: Mapping[str, Any], shared: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the parity report of target `name` in `folder`; `shared` are the keys common to all targets.

    If the run's data can't be opened, a warning says that only noise is compared, and `held_out` and `figures` are
    None. Raises UserError if the file is outside its tolerance.
    """
    split, held, lacking = shared["split"], Held([], []), "no batch has the sizes of the example"
    odd = ready.odd_inputs() if isinstance(ready, CoreModel) else odd_inputs(ready)
    try:
        _ = ready.data
    except UserError as error:
        lacking = str(error)
    else:
        if isinstance(ready, CoreModel):
            split = evaluated_split(ready, split)
            held = Held([], ready.held_out(split, shared["samples"]))
        else:
            held = held_out(ready, split, shared["samples"])
    if not held.inputs:
        rank_zero_warn(f"target={name}: the file is compared with the module on noise alone, without data: {lacking}")
    inputs, n = [*held.inputs, *odd], len(held.inputs)
    job = {"folder": str(folder.absolute()), "run": str(run.absolute()), "threads": torch.get_num_threads()}
    kind = "values" if isinstance(ready, CoreModel) else ready.task.predicts
    try:
        references = reference_outputs(ready, inputs)
        outputs = probe_outputs(job, inputs)
        difference = compare(outputs[:n], references[:n], kind) if n else None
        strange = compare(outputs[n:], references[n:], kind)
    except UserError as error:
        raise UserError(f"target={name}: {error}, so nothing was exported.") from error
    arithmetic = arithmetic_of(ready, options)
    largest, least = tolerances(ready, arithmetic)
    report: dict[str, Any] = {
        "target": name,
        "split": split,
        "samples": held.n,
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
        metrics = metrics_of(ready, held, references[:n], outputs[:n])
    return report | metric_drop(ready, metrics, shared["max_drop"], name)


def arithmetic_of(ready: ExportModel, options: Mapping[str, Any]) -> str:
    """Return the arithmetic of the file; weight-only integers are dequantized to floats."""
    if ready.activation_bits is not None:
        return "int8"
    return "float16" if options.get("half") else "float32"


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
    require(
        agreement is None or agreement >= least,  # None: values instead of classes, or no held-out data
        f"{start} {agreement or 0:.4f} of the held-out predictions equal the module's, below {least}, so nothing was "
        "exported; target.agreement=<share> allows less.",
    )


def metrics_of(ready: ExportModel, held: Held, references: Calls, outputs: Calls) -> dict[str, Any]:
    """Return the held-out metrics of the run's own net, of the exported module, and of the file."""

    def of(calls: Calls) -> dict[str, float]:
        following = iter(calls)
        return score(ready.task, lambda x: next(following)[0], held.batches)

    module = of(references)
    same = ready.inner is ready.trained and ready.other_size is None
    trained = module if same else score(ready.task, ready.trained, held.batches)
    return {"trained": trained, "module": module, "file": of(outputs)}


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
    figures = {which: {key: _finite(value) for key, value in found.items()} for which, found in metrics.items()}
    if metric not in metrics["file"]:
        print(f"target={name}: no metric was compared, since callbacks.checkpoint.monitor names none of this split.")
        return {"figures": figures, "metric": None, "drop": None, "max_drop": None}
    if metric == "loss" and "perplexity" in ready.task.computed:
        metric = "perplexity"  # a loss may be nearly 0, which makes a relative drop meaningless
    own, found = metrics["trained"][metric], metrics["file"][metric]
    worse = found - own if metric in minimised else own - found
    drop = worse / abs(own) if own else worse
    most = None if ready.other_size is not None else most
    fix = "train with compression=qat, or raise it" if ready.facts["calibrated"] else "raise it"
    require(
        most is None or drop <= most,
        f"target={name}: {metric} on held-out data is {found:.4f} and that of the run's own net {own:.4f}, worse by "
        f"{drop:.2g} of it, above target.max_drop={most}, so nothing was exported: choose another target, {fix}.",
    )
    return {"figures": figures, "metric": metric, "drop": _finite(drop), "max_drop": most}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None  # JSON has no others


def evaluated_split(ready: CoreModel, split: str) -> str:
    """Return the split that a LightningModule's own steps evaluate: val where it or the data have no test."""
    tests = is_overridden("test_step", ready.task.driven) and is_overridden(
        "test_dataloader", ready.data, LightningDataModule
    )
    return split if tests else "val"


def core_metrics(ready: CoreModel, run: Path, folder: Path, split: str, batches: int) -> dict[str, dict[str, float]]:
    """Return what the LightningModule's own steps log on the first `batches` of a split: with its core as trained, with
    the exported module, and with the file in the place of the core. {} for a module without such a step, or for a file
    of weights alone.
    """
    step = "test_step" if split == "test" else "validation_step"
    name = manifests.read(folder)["target"]
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


def held_out(ready: ExportModel, split: str, samples: int | None) -> Held:
    """Return the first `samples` of a split, or as many as `LOGITS` and `INPUTS` allow.

    Padding rows are left out, and images are scaled to the input size of the file.
    """
    held, logits, inputs = Held([], []), 0, 0
    left = sys.maxsize if samples is None else samples
    for batch in ready.data.eval_loader(split):
        batch = _without_padding(tuple(batch))
        for start in range(0, len(batch[0]), most_of(ready)):
            part = _rows(batch, slice(start, start + min(most_of(ready), left)))
            x = ready.inputs_of(part[0])
            if x.dtype == torch.uint8:
                own = make_preprocess(ready.cfg)
                off = (own(x) - part[0]).abs()
                require(
                    bool((off <= STEP * own.scale).all()),
                    f"target.preprocess=true: the data differ by {off.max():.2g} from (pixel / 255 - data.mean) / "
                    "data.std. Set target.preprocess=false.",
                )
                if ready.other_size is not None:
                    x = inside(x, ready.other_size)
            held.batches.append(part)
            held.inputs.append(x)
            left, logits, inputs = left - len(x), logits + ready.logits_of(x), inputs + x.nbytes
            if left == 0 or logits > LOGITS or inputs > INPUTS:
                return held
    return held


def inside(x: Tensor, size: tuple[int, int]) -> Tensor:
    """Return images of `size` with `x`, scaled, in the centre that `Preprocess` crops; borders repeat."""
    ratio = min(side / own for side, own in zip(size, x.shape[2:], strict=True))
    tall, wide = (min(side, max(1, round(own * ratio))) for side, own in zip(size, x.shape[2:], strict=True))
    top, left = (size[0] - tall) // 2, (size[1] - wide) // 2
    middle = interpolate(x.float(), size=(tall, wide), mode="bilinear", antialias=True).round().clamp(0, 255)
    return pad(middle, (left, size[1] - wide - left, top, size[0] - tall - top), mode="replicate").to(torch.uint8)


def _rows(batch: tuple[Any, ...], index: Any) -> tuple[Any, ...]:
    return tuple(item[index] if torch.is_tensor(item) and item.dim() > 0 else item for item in batch)


def _without_padding(batch: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the batch without rows whose targets are ignored."""
    targets = batch[1] if len(batch) > 1 else None
    if not torch.is_tensor(targets) or targets.is_floating_point() or targets.shape[:1] != batch[0].shape[:1]:
        return batch
    return _rows(batch, (targets != IGNORE).view(len(targets), -1).any(1))


def most_of(ready: ExportModel) -> int:
    """Return the largest number of rows of a batch."""
    return max(1, BYTES // ready.example[:1].numel())


def odd_inputs(ready: ExportModel) -> list[Tensor]:
    """Return noise and extreme values in batch sizes that were not traced, and in other lengths or sizes."""
    draw = torch.Generator().manual_seed(0)
    shape, given = ready.example.shape[1:], ready.facts["input"]
    found = []
    for number, batch in enumerate(size for size in BATCHES if size <= max(2, most_of(ready))):
        if ready.example.dtype == torch.uint8:
            sides = list(shape[1:])
            if ready.takes_any_size:
                sides = torch.randint(1, 4 * max(sides) + 1, (2,), generator=draw).tolist() if number else [1, 1]
            found.append(torch.randint(0, 256, (batch, shape[0], *sides), generator=draw, dtype=torch.uint8))
            if number < 2:
                found.append(torch.full((batch, *shape), 255 * number, dtype=torch.uint8))
        elif ready.example.is_floating_point():
            found.append(torch.randn(batch, *shape, generator=draw))
        else:
            time = shape[0]
            if given["shape"][1] == "time":
                time = int(torch.randint(1, time + 1, (), generator=draw)) if number else 1
            found.append(torch.randint(0, given["vocab_size"], (batch, time), generator=draw))
    return found


def compare(outputs: Calls, references: Calls, predicts: str) -> dict[str, Any]:
    """Return the `largest` difference of a file's outputs from the module's, `references`.

    `relative` is its share of `scale`, the largest logit; a nan makes it nan. `agreement` is the share of equal
    predictions among `n`, None for values; of integers and booleans, the share of equal ones. Of several outputs the
    worst counts. Raises UserError if an output has another shape.
    """
    found, shares = [], []
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
        found.append({"largest": largest, "scale": scale, "relative": largest / scale if scale else largest, "n": n})
    worst = max(found, key=lambda each: math.inf if math.isnan(each["relative"]) else each["relative"])
    return {**worst, "agreement": min((share for share in shares if share is not None), default=None)}


@torch.no_grad()
def reference_outputs(ready: ExportModel, inputs: Sequence[Any]) -> list[list[Tensor]]:
    """Return the module's outputs for each call; raise UserError for nan, inf or random numbers."""

    def call(x: Any) -> list[Tensor]:  # a core may write into its input
        return [_wide(output) for output in as_list(ready.net(*(tensor.clone() for tensor in as_list(x))))]

    found = [call(x) for x in inputs]
    for x, outputs in zip(inputs, found, strict=True):
        shape = list(as_list(x)[0].shape)
        finite = all(bool(output.isfinite().all()) for output in outputs)
        require(finite, f"the run's own net answers an input of shape {shape} with nan or inf")
    again = call(inputs[0]) if isinstance(ready, CoreModel) else found[0]
    same = all(torch.equal(*pair) for pair in zip(found[0], again, strict=True))
    require(same, f"model.core: {type(ready.inner).__name__} draws random numbers: name a submodule that does not")
    return found


def _wide(output: Tensor) -> Tensor:
    return output.float() if output.is_floating_point() else output


def probe_outputs(job: Mapping[str, Any], inputs: Sequence[Any]) -> list[list[Tensor]]:
    """Return the outputs of each call of `lathe.verbs.export_probe`, a fresh process; raise UserError if it fails."""
    with scratch() as folder:
        (folder / "job.json").write_text(json.dumps(job))
        for number, x in enumerate(inputs):
            np.savez(folder / f"in_{number}.npz", *(tensor.numpy() for tensor in as_list(x)))
        _run([sys.executable, "-m", PROBE, str(folder)])
        found = []
        for number in range(len(inputs)):
            with np.load(folder / f"out_{number}.npz") as file:
                found.append([_wide(torch.from_numpy(array)) for array in file.values()])
        return found


def _run(words: list[str]) -> None:
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=SECONDS)  # our own module  # noqa: S603
    except subprocess.TimeoutExpired as error:
        raise UserError(f"a fresh process did not answer within {SECONDS} seconds") from error
    lines = [line for line in done.stderr.splitlines() if line.strip()] or [f"exit code {done.returncode}"]
    require(not done.returncode, f"a fresh process could not run the file ({lines[-1][:300].rstrip('.')})")
