"""The short table at the end of a run, and the commands to try next."""

import shlex
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.table import Table

from lathe.config.compression_plan import methods
from lathe.config.resolve import flatten
from lathe.runs.metric_names import split_of
from lathe.runs.places import shown
from lathe.runs.rundir import RunDir
from lathe.runs.typed import run_words, train_words, typed_script, value_typed, without_replaced


def show(result: dict[str, Any], run: RunDir, console: Console | None = None, ended: str = "") -> None:
    """Print the final metrics of `run`, why it `ended` early if it did, and its directory."""
    console = console or Console()
    table = Table(show_header=False)
    names = _of(result, "test") or _of(result, "val")
    for name in names:
        table.add_row(name, _metric(result[name]))
    monitor = result.get("monitor")  # of best.ckpt, by which it was chosen
    if monitor in result and monitor not in names:
        table.add_row(monitor, _metric(result[monitor]))
    for name in sorted(key for key in result if "/" in key and split_of(key) is None):
        table.add_row(name, _metric(result[name]))  # what compression and the user's own parts report
    if "best" in result:
        table.add_row("best", result["best"])
    table.add_row("parameters", f"{result['parameters']:,}")
    if result.get("samples_per_s"):
        table.add_row("samples/s", f"{result['samples_per_s']:,.0f}")
    for name, value in _costs(result):
        table.add_row(name, value)
    table.add_row("seconds", f"{result['seconds']:.1f}")
    title = f"Run complete: {ended}" if ended else "Run complete"
    console.print(title, style="italic", soft_wrap=True, highlight=False, markup=False)
    console.print(table)
    for note in (f"Run directory: {shown(run.path)}", *result.get("notes", [])):
        console.print(note, soft_wrap=True, highlight=False, markup=False)


def show_next(run: RunDir, commands: list[str], console: Console | None = None) -> None:
    """Print the pages that `run` has written, and commands to try next."""
    console = console or Console()
    pages = [f"Samples page: {shown(page)}" for page in sorted(run.path.glob("samples/*.html"))]
    for line in (*pages, "Next:", *(f"  {command}" for command in commands)):
        console.print(line, soft_wrap=True, highlight=False, markup=False)


def _of(result: dict[str, Any], split: str) -> list[str]:
    return sorted(name for name in result if split_of(name) == split)


def _costs(result: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """What the run took, where it was measured."""
    if result.get("epoch_s"):
        yield "seconds per epoch (median)", f"{result['epoch_s']:.2f}"
    for name, place in (("peak_gpu_bytes", "peak memory, GPU"), ("peak_resident_bytes", "peak memory, resident")):
        if result.get(name):
            yield place, f"{result[name] / 2**30:.2f} GiB"
    if result.get("slowest_rank"):
        told = f"{result['rank_ms_min']:.1f} to {result['rank_ms_max']:.1f}, slowest {result['slowest_rank']}"
        yield "own ms of a process", told
    for name, place in (("energy_gpu_j", "energy, GPU"), ("energy_cpu_j", "energy, CPU packages")):
        if result.get(name):
            yield place, f"{result[name] / 3600:.3g} Wh"


def _metric(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4f}"


def proposals(run: RunDir, cfg: dict[str, Any]) -> list[str]:
    """Commands that make sense after `run`: its metrics on the validation split, the same run with half its learning
    rate and with other seeds, its export if it was compressed, a report of all runs of its name, and what shows the
    files of its loggers."""
    words = retyped(run.overrides if (run.path / "overrides.yaml").is_file() else [], flatten(cfg))
    evaluate = ["python", typed_script("scripts/evaluate.py"), *run_words("run", shown(run.path), cfg), "split=val"]
    found = [evaluate, *_exports(run, cfg)] if run.best.exists() else []
    rate = cfg["optimizer"].get("lr")
    if isinstance(rate, (int, float)):
        found.append([*train_words(), *without(words, "optimizer.lr"), f"optimizer.lr={rate / 2:g}"])
    found.append([*train_words(), "-m", *without(words, "seed"), "seed=1,2,3"])
    found.append(_report(run))
    if any(run.path.rglob("events.out.tfevents.*")):
        found.append(["tensorboard", "--logdir", shown(run.path)])
    if offline := sorted(run.path.glob("wandb/offline-run-*")):
        found.append(["wandb", "sync", *(shown(part) for part in offline)])
    return [shlex.join(command) for command in found]


def proposals_after_compress(run: RunDir, cfg: dict[str, Any]) -> list[str]:
    """Commands that make sense after scripts/compress.py has made `run`."""
    return [shlex.join(command) for command in (*_exports(run, cfg), _report(run))]


def _exports(run: RunDir, cfg: dict[str, Any]) -> list[list[str]]:
    """The command that exports a compressed run."""
    kinds = [node["kind"] for node in methods(cfg.get("compression") or {}).values()]
    target = "onnx_int8" if {"quantization", "after"} & set(kinds) else "onnx"
    words = ["python", typed_script("scripts/export.py"), *run_words("run", shown(run.path), cfg), f"target={target}"]
    return [words] if kinds else []


def _report(run: RunDir) -> list[str]:
    return ["python", typed_script("scripts/report.py"), f"runs={value_typed(shown(run.path.parent))}"]


def retyped(words: list[str], leaves: dict[str, Any]) -> list[str]:
    """The overrides that make another run like the one for which `words` were typed, whose configuration has these
    `leaves`: without what names that one alone, and with the runs that it started from or learned from as they were
    found then, since logs/latest leads elsewhere by now."""
    kept = []
    for word in without(without_replaced(words), "resume", "sweep", "hydra", "launch.id", "paths.run_dir"):
        key = _key(word)
        known = leaves.get(key) if key.endswith(("ckpt_path", "teacher")) else None
        kept.append(f"{word.partition('=')[0]}={value_typed(known)}" if isinstance(known, str) else word)
    return kept


def _key(word: str) -> str:
    return word.lstrip("+~").partition("=")[0].partition("@")[0]


def without(words: list[str], *keys: str) -> list[str]:
    """Those of `words` that set nothing at `keys` or below."""
    return [
        word
        for word in words
        if not any(_key(word) == key or _key(word).startswith((f"{key}.", f"{key}/")) for key in keys)
    ]
