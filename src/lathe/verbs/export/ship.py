"""Export a run to targets; keep only files that pass their comparison."""

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from lathe import export, measure
from lathe.errors import UserError
from lathe.export import manifest as manifests
from lathe.runs.rundir import RunDir
from lathe.training.trainer_setup import configure_logging
from lathe.verbs.export.compare import compared
from lathe.verbs.export.folder import fresh_folder
from lathe.verbs.export.make import files_in, make, ready_for
from lathe.verbs.export.request import check_request, taken, targets_of


def ship(cfg: dict[str, Any]) -> dict[str, Any]:
    """Export the requested run to each target, into the run's exports/<target>; return the parity reports.

    After a failure the other targets are still exported; then UserError is raised.
    """
    configure_logging()
    run = RunDir(cfg["paths"]["run_dir"])
    targets = targets_of(cfg["request"]["target"])
    check_request(cfg, run)
    reports: dict[str, Any] = {}
    failed: list[UserError] = []
    for name, options in targets.items():
        try:
            reports[name] = ship_one(run, cfg["request"], name, options)
        except UserError as error:
            failed.append(error)
    show(reports, run.path)
    if failed:
        raise UserError(" ".join(map(str, failed))) from failed[0]
    return reports


def ship_one(run: RunDir, request: Mapping[str, Any], name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Export to one target, and return its parity report."""
    began, shared = time.monotonic(), request["target"]
    ready = ready_for(
        name,
        options,
        run.path,
        checkpoint=request["checkpoint"],
        preprocess=shared["preprocess"],
        input_size=shared["input_size"],
        eval_batch_size=request["batch_size"],
        data_folder=request["data"]["folder"],
    )
    target, own = export.get(name), {option: value for option, value in options.items() if option != "integers"}
    with torch.random.fork_rng(devices=[]), torch.no_grad(), fresh_folder(run.path / "exports" / name) as folder:
        facts = make(ready, name, options, folder)
        seconds = time.monotonic() - began
        report = compared(run.path, ready, folder, name, own, shared)
        report |= {"export_seconds": seconds, "seconds": time.monotonic() - began, "versions": measure.versions()}
        (folder / "parity.json").write_text(json.dumps(report, indent=2, allow_nan=False) + "\n")
        manifests.write(folder, facts, files_in(folder))
        if hasattr(target, "complete"):
            target.complete(folder)
            manifests.write(folder, facts, files_in(folder))
    if hasattr(target, "publish"):
        target.publish(run.path / "exports" / name, **taken(target.publish, own))
    return report


def show(reports: Mapping[str, Any], run: Path, console: Console | None = None) -> None:
    """Print a line for each target, within 80 columns.

    `differ by` is the largest difference of a logit as a share of the largest logit.
    """
    if not reports:
        return
    first = next(iter(reports.values()))
    title = f"Exports: {first['metric']} on {first['samples']} held-out samples ({first['split']})"
    if first["held_out"] is None:
        title = "Exports: compared on noise only"
    table = Table(title=title, title_justify="left")
    for column in ("target", "in", "run", "file", "equal\npredictions", "logits\ndiffer by"):
        table.add_column(column, justify="left" if column in ("target", "in") else "right")
    for name, report in reports.items():
        held, metric, figures = report["held_out"], report["metric"], report["figures"]
        metrics = [_metric(figures[which][metric]) for which in ("trained", "file")] if figures else ["-", "-"]
        difference = held or report["odd_inputs"]
        equal = "-" if difference["agreement"] is None else f"{difference['agreement']:.2%}"
        table.add_row(name, report["arithmetic"], *metrics, equal, f"{difference['relative']:.1e}")
    console = console or Console()
    console.print(table)
    changed = [name for name, report in reports.items() if (f := report["figures"]) and f["trained"] != f["module"]]
    if changed:
        note = "the export changed the net (calibration, input size): equal predictions compare the file with that net"
        console.print(f"{', '.join(changed)}: {note}.", highlight=False)
    for name in reports:
        console.print(f"{run / 'exports' / name}", soft_wrap=True, highlight=False)


def _metric(value: float | None) -> str:
    return "inf" if value is None else f"{value:.4f}"
