"""Prints the short table at the end of a run, and the commands to try next."""

import shlex
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from lathe.config.compression_plan import methods
from lathe.config.metric_names import split_of
from lathe.config.resolve import flatten
from lathe.runs.rundir import (
    RunDir,
    display_path,
    drop_overrides,
    quote_value,
    rerun_overrides,
    script_path,
    train_command,
)


def print_summary(result: dict[str, Any], run: RunDir, console: Console | None = None, ended: str = "") -> None:
    """Print the final metrics of `run`, why it `ended` early if it did, and its directory."""
    console = console or Console()
    table = Table(show_header=False)
    names = _of_split(result, "test") or _of_split(result, "val")
    for name in names:
        table.add_row(name, _format(result[name]))
    monitor = result.get("monitor")  # that has chosen best.ckpt
    if monitor in result and monitor not in names:
        table.add_row(monitor, _format(result[monitor]))
    for name in sorted(key for key in result if "/" in key and split_of(key) is None):
        table.add_row(name, _format(result[name]))  # reports of compression and of the user's callbacks
    if "best" in result:
        table.add_row("best", result["best"])
    table.add_row("parameters", f"{result['parameters']:,}")
    if result.get("samples_per_s"):
        table.add_row("samples/s", f"{result['samples_per_s']:,.0f}")
    if result.get("epoch_s"):
        table.add_row("seconds per epoch (median)", f"{result['epoch_s']:.2f}")
    for name, title in (("peak_gpu_bytes", "peak memory, GPU"), ("peak_resident_bytes", "peak memory, resident")):
        if result.get(name):
            table.add_row(title, f"{result[name] / 2**30:.2f} GiB")
    table.add_row("seconds", f"{result['seconds']:.1f}")
    title = f"Run complete: {ended}" if ended else "Run complete"
    console.print(title, style="italic", soft_wrap=True, highlight=False, markup=False)
    console.print(table)
    for note in (f"Run directory: {display_path(run.path)}", *result.get("notes", [])):
        console.print(note, soft_wrap=True, highlight=False, markup=False)


def print_next(run: RunDir, commands: list[str], console: Console | None = None) -> None:
    """Print the pages that `run` has written, and commands to try next."""
    console = console or Console()
    pages = [f"Samples page: {display_path(page)}" for page in sorted(run.path.glob("samples/*.html"))]
    for line in (*pages, "Next:", *(f"  {command}" for command in commands)):
        console.print(line, soft_wrap=True, highlight=False, markup=False)


def _of_split(result: Mapping[str, Any], split: str) -> list[str]:
    return sorted(name for name in result if split_of(name) == split)


def _format(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4f}"


def proposals(run: RunDir, cfg: dict[str, Any], result: Mapping[str, Any]) -> list[str]:
    """Return commands to try after `run`: evaluate if its `result` has metrics of a validation, export if compressed,
    train with half the learning rate and with other seeds, report, and open its loggers' files.
    """
    words = rerun_overrides(run.overrides if (run.path / "overrides.yaml").is_file() else [], flatten(cfg))
    shown = display_path(run.path)
    evaluate = ["python", script_path("scripts/evaluate.py"), f"run={quote_value(shown)}", "split=val"]
    validated = _of_split(result, "val")
    found = [*([evaluate] if validated else []), *_exports(run, cfg)] if run.best.exists() else []
    rate = cfg["optimizer"].get("lr")
    if isinstance(rate, (int, float)):
        found.append([*train_command(), *drop_overrides(words, "optimizer.lr"), f"optimizer.lr={rate / 2:g}"])
    found.append([*train_command(), "-m", *drop_overrides(words, "seed"), "seed=1,2,3"])
    found.append(_report(run))
    if any(run.path.rglob("events.out.tfevents.*")):
        found.append(["tensorboard", "--logdir", shown])
    if offline := sorted(run.path.glob("wandb/offline-run-*")):
        found.append(["wandb", "sync", *(display_path(part) for part in offline)])
    return [shlex.join(command) for command in found]


def proposals_after_compress(run: RunDir, cfg: dict[str, Any]) -> list[str]:
    """Return commands to try after scripts/compress.py has made `run`."""
    return [shlex.join(command) for command in (*_exports(run, cfg), _report(run))]


def _exports(run: RunDir, cfg: dict[str, Any]) -> list[list[str]]:
    """Return the command that exports a compressed run."""
    kinds = {node["kind"] for node in methods(cfg.get("compression") or {}).values()}
    target = "onnx_int8" if {"quantization", "after"} & kinds else "onnx"
    run_word = f"run={quote_value(display_path(run.path))}"
    return [["python", script_path("scripts/export.py"), run_word, f"target={target}"]] if kinds else []


def _report(run: RunDir) -> list[str]:
    return ["python", script_path("scripts/report.py"), f"runs={quote_value(display_path(run.path.parent))}"]
