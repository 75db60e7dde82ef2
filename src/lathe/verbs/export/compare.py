"""The parity report of an export, and its checks."""

import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lathe import export
from lathe.errors import UserError, require
from lathe.runs.export_model import ExportModel
from lathe.runs.inference import score
from lathe.verbs.export import parity

PROBE, RELOAD = "lathe.export.probe", "lathe.verbs.export.reload"

# Largest difference of a logit as a share of the largest logit, and least share of equal predictions, by arithmetic.
# Measured on nets of 8 to 56 layers: 3e-6 in float32 (order of summation); in integers 2e-2, or 5e-2 after channel
# pruning, since rounded biases move some activations by one step.
TOLERANCES = {"float32": (5e-5, 0.999), "float16": (2e-2, 0.99), "int8": (0.1, 0.97)}
WIDEST = 0.5  # for few bits, whose large steps leave mainly the predictions to compare


def compared(
    run: Path, ready: ExportModel, folder: Path, name: str, options: Mapping[str, Any], shared: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the parity report of target `name` in `folder`; `shared` are the keys common to all targets.

    If the run's data can't be opened, a warning says that only noise is compared, and `held_out` and `figures` are
    None. Raises UserError if the file is outside its tolerance.
    """
    held = _held_out(ready, name, shared)
    odd = parity.odd_inputs(ready)
    target = export.get(name)
    arithmetic = arithmetic_of(ready, options)
    largest, least = tolerances(ready, arithmetic)
    largest = largest if shared["tolerance"] is None else shared["tolerance"]
    least = least if shared["agreement"] is None else shared["agreement"]
    job = {"folder": str(folder.absolute()), "run": str(run.absolute()), "threads": torch.get_num_threads()}
    inputs = [*held.inputs, *odd]
    try:
        references = parity.answers_of(ready, inputs)
        answers = parity.answered([PROBE if target.computes else RELOAD], job, inputs)
        n, kind = len(held.inputs), ready.task.predicts
        difference = parity.differences(held.inputs, answers[:n], references[:n], kind) if n else None
        strange = parity.differences(odd, answers[n:], references[n:], kind)
    except UserError as error:
        raise UserError(f"target={name}: {error}, so nothing was exported.") from error
    report = {
        "target": name,
        "split": shared["split"],
        "samples": held.n,
        "arithmetic": arithmetic,
        "tolerance": largest,
        "least_agreement": None if strange.agreement is None else least,
        "held_out": difference and {**asdict(difference), "relative": difference.relative},
        "odd_inputs": {**asdict(strange), "relative": strange.relative, "shapes": [list(x.shape) for x in odd]},
    }
    judge(report)
    if difference is None:
        report |= {"figures": None, "metric": None, "drop": None, "max_drop": None}
    else:
        report |= drop_of(ready, metrics_of(ready, held, references[:n], answers[:n]), shared["max_drop"], name)
    return {**report, "fresh_process": True}


def _held_out(ready: ExportModel, name: str, shared: Mapping[str, Any]) -> parity.Held:
    """Return the held-out samples; none, with a warning, if the run's data can't be opened."""
    try:
        _ = ready.data
    except UserError as error:
        rank_zero_warn(
            f"target={name}: the file is compared with the module on noise alone, not on held-out data, and nobody "
            f"knows its accuracy, for {error}"
        )
        return parity.Held([], [])
    return parity.held_out(ready, shared["split"], shared["samples"])


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


def judge(report: Mapping[str, Any]) -> None:
    """Raise UserError for a report outside its tolerance; a difference of nan always is."""
    start = f"target={report['target']}:"
    for what in ("held_out", "odd_inputs"):
        if report[what] is None:
            continue
        found = report[what]["relative"]
        require(
            found <= report["tolerance"],
            f"{start} logits on {what.replace('_', '-')} data differ from the module's by {found:.2g} of the "
            "largest, above the "
            f"tolerance of {report['tolerance']:g}, so nothing was exported; target.tolerance=<share> allows more.",
        )
    agreement = (report["held_out"] or {"agreement": None})["agreement"]
    if agreement is None:  # values instead of classes, or no held-out data
        return
    require(
        agreement >= report["least_agreement"],
        f"{start} {agreement:.4f} of the held-out predictions equal the module's, below {report['least_agreement']:g}, "
        "so nothing was exported; target.agreement=<share> allows less.",
    )


def metrics_of(
    ready: ExportModel, held: parity.Held, references: list[torch.Tensor], answers: list[torch.Tensor]
) -> dict[str, Any]:
    """Return the held-out metrics of the run's own net, of the exported module, and of the file."""

    def told(outputs: list[torch.Tensor]) -> dict[str, float]:
        following = iter(outputs)
        return score(ready.task, lambda x: next(following), held.batches)

    module = told(references)
    same = ready.inner is ready.trained and ready.other_size is None
    return {
        "trained": module if same else score(ready.task, ready.trained, held.batches),
        "module": module,
        "file": told(answers),
    }


def drop_of(
    ready: ExportModel, metrics: Mapping[str, Mapping[str, float]], most: float | None, name: str
) -> dict[str, Any]:
    """Return the metrics, the one that is checked, and its relative drop from the run's net to the file.

    The drop is the cost of calibration and of other arithmetic; it is checked unless the file has another input size.
    """
    metric = ready.task.monitor.rpartition("/")[2]
    if metric == "loss" and "perplexity" in ready.task.computed:
        metric = "perplexity"  # a loss may be nearly 0, which makes a relative drop meaningless
    own, found = metrics["trained"][metric], metrics["file"][metric]
    worse = found - own if metric in ready.task.minimised else own - found
    drop = worse / abs(own) if own else worse
    judged = most is not None and ready.other_size is None
    require(
        not judged or drop <= most,  # type: ignore[operator]  # a number here
        f"target={name}: {metric} on held-out data is {found:.4f} and that of the run's own net {own:.4f}, worse by "
        f"{drop:.2g} of it, above target.max_drop={most}, so nothing was exported: {_way_out(ready)}.",
    )
    plain = {
        which: {key: value if math.isfinite(value) else None for key, value in of.items()}
        for which, of in metrics.items()
    }
    return {
        "figures": plain,
        "metric": metric,
        "drop": drop if math.isfinite(drop) else None,
        "max_drop": most if judged else None,
    }


def _way_out(ready: ExportModel) -> str:
    if ready.facts["calibrated"]:
        return "train with compression=qat, try scripts/compress.py compression=ptq_static, or raise target.max_drop"
    return "choose another target, or raise target.max_drop"
