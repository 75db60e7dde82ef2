"""The parity report of an export, and the verdict on it."""

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

# Largest difference of a logit as a share of the largest logit, and share of equal predictions, by the file's
# arithmetic. Measured of nets of 8 to 56 layers: 3e-6 in float32, where sums are added in another order. In integers
# 2e-2, and 5e-2 where channels were removed before: biases are rounded to whole units, so that some activations fall on
# the other side of a rounding boundary, each by a step.
TOLERANCES = {"float32": (5e-5, 0.999), "float16": (2e-2, 0.99), "int8": (0.1, 0.97)}
WIDEST = 0.5  # of few bits, whose steps are larger: their predictions are what can be compared


def compared(
    run: Path, ready: ExportModel, folder: Path, name: str, options: Mapping[str, Any], shared: Mapping[str, Any]
) -> dict[str, Any]:
    """The parity report of the export to target `name` in `folder`, made of the run directory `run`. `shared` are the
    keys of the target group that hold for every target.

    Where the run's data can't be opened, the file is compared on noise alone, with a warning: `held_out` and `figures`
    are None then.

    Raises:
        UserError: it is outside its tolerance.
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
    """What the file is compared on with the module, nothing where the run's data can't be opened: its directory is
    enough to ship it."""
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
    """What the file computes in: `half` is the option of targets that can halve floats. Integers that only weights are
    stored as become floats again, which rounds nothing."""
    if ready.activation_bits is not None:
        return "int8"
    return "float16" if options.get("half") else "float32"


def tolerances(ready: ExportModel, arithmetic: str) -> tuple[float, float]:
    """The largest difference and the least agreement. A step of fewer than 8 bits is as much larger, and so is what one
    of them makes.
    """
    largest, least = TOLERANCES[arithmetic]
    if arithmetic == "int8" and ready.activation_bits is not None:
        largest = min(largest * 255 / (2**ready.activation_bits - 1), WIDEST)
    return largest, least


def judge(report: Mapping[str, Any]) -> None:
    """Raises UserError for a report outside its tolerance; a difference of nan is outside of any."""
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
    if agreement is None:  # values, which have no classes to agree on; or nothing held out
        return
    require(
        agreement >= report["least_agreement"],
        f"{start} {agreement:.4f} of the held-out predictions equal the module's, below {report['least_agreement']:g}, "
        "so nothing was exported; target.agreement=<share> allows less.",
    )


def metrics_of(
    ready: ExportModel, held: parity.Held, references: list[torch.Tensor], answers: list[torch.Tensor]
) -> dict[str, Any]:
    """Held-out metrics of the run's own net, of what is exported, and of the file."""

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
    """The metrics, which of them is judged, and by how much of itself it is worse in the file than in the run's own
    net: what calibration, or other arithmetic than in training, has cost. Pictures of another size are another input,
    and judged by nobody.

    Raises:
        UserError: it is worse by more than `most`; None allows anything.
    """
    metric = ready.task.monitor.rpartition("/")[2]
    if metric == "loss" and "perplexity" in ready.task.computed:
        metric = "perplexity"  # a loss may be nearly 0, and a share of that nothing
    own, found = metrics["trained"][metric], metrics["file"][metric]
    worse = found - own if metric in ready.task.minimised else own - found
    drop = worse / abs(own) if own else worse
    judged = most is not None and ready.other_size is None
    require(
        not judged or drop <= most,  # type: ignore[operator]  # which is a number then
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
