"""Export a run: load it, write each target's file, compare it in a fresh process, and keep it only if it passes."""

import json
import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from lathe import export, measure
from lathe.errors import UserError, require, under, user_location
from lathe.export import manifest as manifests
from lathe.export.files import fresh_folder
from lathe.runs.checkpoints import KEY, checkpoint_hash
from lathe.runs.export_model import CoreModel, ExportModel, open_core, open_export_model
from lathe.runs.inference import check_input_spec, is_lightning
from lathe.runs.rundir import RunDir, open_run
from lathe.training.trainer_setup import configure_logging
from lathe.verbs.export_parity import compared

# keys of the group that apply to every target
SHARED = ("preprocess", "input_size", "split", "samples", "axes", "tolerance", "agreement", "max_drop")


def ship(cfg: dict[str, Any]) -> dict[str, Any]:
    """Export the requested run to each target, into the run's exports/<target>; return the parity reports.

    After a failure the other targets are still exported; then UserError is raised.
    """
    configure_logging()
    run, request, devices = RunDir(cfg["paths"]["run_dir"]), cfg["request"], cfg["trainer"]["devices"]
    shared, core = request["target"], is_lightning(run.config)
    targets = targets_of(shared)
    if not core:
        check_input_spec(run.config, request["run"])
    run.checkpoint(request["checkpoint"], "checkpoint")
    require(
        shared["input_size"] is None or (shared["preprocess"] and not core),
        f"target.input_size={shared['input_size']} needs target.preprocess=true and a run on images: leave it null.",
    )
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
    found = {name: dict(node) for name, node in group.items() if name not in SHARED and node is not None}
    require(bool(found), f"target is empty: choose one of {', '.join(export.TARGETS)}.")
    return found


def export_to(name: str, options: Mapping[str, Any], run: Path, request: Mapping[str, Any]) -> dict[str, Any]:
    """Export a run to one target, and return its parity report."""
    began, shared, path = time.monotonic(), request["target"], run / "exports" / name
    ready = ready_for(
        name,
        options,
        run,
        preprocess=shared["preprocess"],
        input_size=shared["input_size"],
        axes=shared["axes"],
        checkpoint=request["checkpoint"],
        eval_batch_size=request["batch_size"],
        data_folder=request["data"]["folder"],
    )
    target = get_target(name, options)
    with torch.random.fork_rng(devices=[]), torch.no_grad(), fresh_folder(path) as folder:
        facts = make(ready, name, options, folder)
        seconds = time.monotonic() - began
        report = compared(run, ready, folder, name, options, shared)
        report |= {"export_seconds": seconds, "seconds": time.monotonic() - began, "versions": measure.versions()}
        (folder / "parity.json").write_text(json.dumps(report, indent=2, allow_nan=False) + "\n")
        manifests.write(folder, facts)
        target.complete(folder)
        manifests.write(folder, facts)
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
    """Build the module that target `name` exports: integer or float, with preprocessing, or the core.

    `shared` are `eval_batch_size` and `data_folder` of `open_export_model`.
    """
    target = get_target(name, options)
    missing = target.available()
    require(missing is None, str(missing))
    opened = open_run(run, "run")
    digest = checkpoint_hash(opened.checkpoint(checkpoint, "checkpoint"))  # first: training may replace the file
    shared |= {"checkpoint": checkpoint, "integers": target.integers}
    ready: ExportModel
    if is_lightning(opened.config):
        require(
            target.takes_cores,
            f"target={name} takes nets of images and tokens, not the core of a LightningModule: choose onnx, "
            "torch_export, aot_inductor or executorch.",
        )
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
    try:
        with silent(), under(f"target.{name}"):
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
    manifests.write(folder, facts)
    return facts


@contextmanager
def silent() -> Iterator[None]:
    """Disable logging up to INFO: exporters log every pass over a graph."""
    was = logging.root.manager.disable
    logging.disable(max(was, logging.INFO))
    try:
        yield
    finally:
        logging.disable(was)


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
        note = "the export changed the net (calibration, input size): equal predictions compare the file with that net"
        console.print(f"{', '.join(changed)}: {note}.", highlight=False)
    for name in reports:
        console.print(f"{run / 'exports' / name}", soft_wrap=True, highlight=False)
