"""How fast exported files run and how long they take to make: python benchmarks/bench_export.py

    python benchmarks/bench_export.py --rounds 5

A ResNet-18 (CIFAR's, 3x32x32 pixels) of two training steps is exported by the real command to each target. The first
figure is the time of that whole command: starting Python, compiling, and the comparison in a fresh process on
`--test-size` held-out images. Then the module and all files answer the same uint8 pixels in turns, in one process on
one thread. A round gives the median of its calls; ratios are taken within a round. CPU time is beside wall time: on a
busy machine its ratios are the ones to read. Runs and exports are made in a temporary folder, or taken from `--folder`
if they are there.
"""

import argparse
import json
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lathe.export.bundle import open_bundle
from lathe.measure import describe_cpu, versions
from lathe.runs.export_model import open_export_model

ROOT = Path(__file__).parent.parent
RUN = (
    "data=synthetic",
    "model=resnet18",
    "data.image_size=32",
    "data.channels=3",
    "data.mean=[0.5,0.5,0.5]",
    "data.std=[0.25,0.25,0.25]",
    "data.batch_size=32",
    "trainer.max_epochs=1",
    "trainer.limit_train_batches=2",
    "trainer.limit_val_batches=1",
    "trainer.limit_test_batches=1",
    "trainer.accelerator=cpu",
    "trainer.enable_progress_bar=false",
    "trainer.enable_model_summary=false",
)
FILES = {  # form -> overrides of scripts/export.py
    "onnx": ("target=onnx",),
    "onnx_int8": ("target=onnx_int8",),
    "aot_inductor": ("target=aot_inductor",),
    "aot_inductor, int8": ("target=aot_inductor", "target.aot_inductor.integers=true"),
    "torchscript, fused": ("target=torchscript",),
}
EAGER = "eager"
CALLS = {1: 40, 32: 7}  # of each form in a round, by batch
AOT, INT8 = 0.85, {1: 3.0, 32: 5.0}  # the bars: of eager's time, and times as fast as eager
SECONDS = 90.0


def command(script: str, *words: str) -> float:
    """Return the seconds of a command."""
    began = time.monotonic()
    line = [sys.executable, str(ROOT / script), *words]
    done = subprocess.run(line, capture_output=True, text=True)  # noqa: S603
    if done.returncode:
        raise SystemExit(f"{script} {' '.join(words)}: {done.stdout[-2000:]}\n{done.stderr[-3000:]}")
    return time.monotonic() - began


def make(folder: Path, test_size: int) -> tuple[Path, dict[str, dict[str, Any]]]:
    """Return the run, and by form its export's folder, bytes, and seconds of the command (if made now)."""
    if not (folder / "latest").exists():
        command("train.py", *RUN, f"data.source.test_size={test_size}", f"paths.log_dir={folder}")
        print("the run is made", file=sys.stderr, flush=True)
    run = (folder / "latest").resolve()
    found: dict[str, dict[str, Any]] = {}
    for form, words in FILES.items():
        kept = run / "forms" / form.replace(", ", "_")
        seconds = None
        if not kept.exists():
            seconds = command("scripts/export.py", f"run={run}", *words)
            kept.parent.mkdir(exist_ok=True)
            (run / "exports" / words[0].removeprefix("target=")).rename(kept)
            print(f"{form}: {seconds:.1f} s", file=sys.stderr, flush=True)
        report = json.loads((kept / "parity.json").read_text())
        manifest = json.loads((kept / "manifest.json").read_text())
        found[form] = {
            "folder": str(kept),
            "seconds": seconds,
            "bytes": manifest["files"][manifest["file"]]["bytes"],
            "export_seconds": report["export_seconds"],
            "parity_seconds": report["seconds"] - report["export_seconds"],
            "difference": report["held_out"]["relative"],
            "agreement": report["held_out"]["agreement"],
        }
    return run, found


def timed(calls: Mapping[str, Callable[[], Any]], repeats: int, draw: random.Random) -> dict[str, dict[str, float]]:
    """Return median milliseconds of wall and CPU time by name, of interleaved calls after one to warm up."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    names = list(calls)
    for _ in range(repeats):
        draw.shuffle(names)
        for name in names:
            calls[name]()
            wall, cpu = time.perf_counter(), time.process_time()
            calls[name]()
            times[name].append((time.perf_counter() - wall, time.process_time() - cpu))
    return {
        name: {
            clock: 1e3 * statistics.median(pair[place] for pair in pairs) for place, clock in enumerate(("wall", "cpu"))
        }
        for name, pairs in times.items()
    }


def measured(
    run: Path, exports: dict[str, dict[str, Any]], rounds: int
) -> dict[int, list[dict[str, dict[str, float]]]]:
    """Return the medians of each round, by batch."""
    torch.set_num_threads(1)
    net = open_export_model(run).net
    runs: dict[str, Callable[[Any], Any]] = {
        form: open_bundle(entry["folder"], threads=1) for form, entry in exports.items()
    }
    runs[EAGER] = lambda x: net(torch.from_numpy(x))
    draw, noise = random.Random(0), np.random.default_rng(0)  # noqa: S311  # an order, not a secret
    found: dict[int, list[dict[str, dict[str, float]]]] = {}
    with torch.no_grad():
        for batch, repeats in CALLS.items():
            pixels = noise.integers(0, 256, (batch, 3, 32, 32), dtype=np.uint8)
            calls = {form: partial(call, pixels) for form, call in runs.items()}
            for call in calls.values():
                for _ in range(4):
                    call()
            found[batch] = [timed(calls, repeats, draw) for _ in range(rounds)]
            print(f"batch {batch} is measured", file=sys.stderr, flush=True)
    return found


def spread(values: list[float], digits: int = 2) -> str:
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def shares(rounds: list[dict[str, dict[str, float]]], form: str, clock: str) -> list[float]:
    """Return times over eager's, round by round."""
    return [medians[form][clock] / medians[EAGER][clock] for medians in rounds]


def verdicts(
    found: dict[int, list[dict[str, dict[str, float]]]], exports: dict[str, dict[str, Any]], clock: str
) -> list[str]:
    def said(text: str, met: bool) -> str:
        return f"- {text}: {'met' if met else '**missed**'}"

    share = statistics.median(shares(found[1], "aot_inductor", clock))
    lines = [said(f"AOTInductor, fp32, batch 1: {share:.2f} of eager's {clock} time, bar {AOT}", share <= AOT)]
    for batch, bar in INT8.items():
        times = {
            form: 1 / statistics.median(shares(found[batch], form, clock))
            for form in ("onnx_int8", "aot_inductor, int8")
        }
        best = max(times, key=lambda form: times[form])
        text = f"int8, batch {batch}: {times[best]:.2f} times as fast as eager ({best}), bar {bar}"
        lines.append(said(text, times[best] >= bar))
    made = {form: entry["seconds"] for form, entry in exports.items() if entry["seconds"] is not None}
    if made:
        slowest = max(made, key=lambda form: made[form])
        text = f"export with its comparison: {made[slowest]:.0f} s at most ({slowest}), bar {SECONDS:.0f} s"
        lines.append(said(text, made[slowest] <= SECONDS))
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--rounds", type=int, default=5, help=f"each of {CALLS[1]} calls at batch 1 and {CALLS[32]} at batch 32"
    )
    parser.add_argument(
        "--test-size",
        type=int,
        default=1000,
        help="held-out images that each export is compared on; more than 1000 are compared only if target.samples "
        "says so",
    )
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall", help="what the verdicts are taken from")
    parser.add_argument("--folder", type=Path, help="where the run and its exports are kept and looked for")
    parser.add_argument("--json", type=Path, help="a file for all figures")
    options = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        run, exports = make((options.folder or Path(temporary)).resolve(), options.test_size)
        found = measured(run, exports, options.rounds)
    lines = [
        "| form | bytes | batch | ms, wall | of eager's | ms, CPU | of eager's |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for batch, rounds in found.items():
        for form in (EAGER, *exports):
            cells = [
                f"{spread([medians[form][clock] for medians in rounds])} | {spread(shares(rounds, form, clock))}"
                for clock in ("wall", "cpu")
            ]
            lines.append(
                f"| {form} | {exports[form]['bytes'] if form in exports else ''} | {batch} | {' | '.join(cells)} |"
            )
    lines += [
        "",
        "| form | command, s | of it export | of it comparison | difference | agreement |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for form, entry in exports.items():
        whole = "" if entry["seconds"] is None else f"{entry['seconds']:.1f}"
        lines.append(
            f"| {form} | {whole} | {entry['export_seconds']:.1f} | {entry['parity_seconds']:.1f} | "
            f"{entry['difference']:.1e} | {entry['agreement']:.4f} |"
        )
    lines += ["", *verdicts(found, exports, options.clock)]
    packages = ", ".join(f"{name} {metadata.version(name)}" for name in ("torch", "onnxruntime"))
    print("\n".join(lines))
    print(
        f"\nMedian of n = {options.rounds} rounds (lowest to highest), one thread; {packages}; Python "
        f"{platform.python_version()}; {time.monotonic() - began:.0f} s."
    )
    if options.json:
        figures = {"rounds": found, "exports": exports, "cpu": describe_cpu(), "versions": versions()}
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
