"""Speed of exported files, and the time that making them takes.

    python benchmarks/bench_export.py --rounds 5

A ResNet-18 (3 x 32 x 32 pixels) of two training steps is exported by scripts/export.py to each target. The first figure
is the time of that command, with the start of Python, compiling, and the comparison in a fresh process on `--test-size`
held-out images. Then the module and all files compute the same uint8 pixels in turns, in one process on one thread. A
round gives the median of its calls; ratios are taken within a round. On a busy machine read the ratios of CPU time.
Runs and exports are made in a temporary folder, or taken from `--folder` if they are there.
"""

import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import QUIET, describe_machine, divide, parser, run_timed, verdict, write_json
from suites.results import Spread, table

from lathe.export.bundle import open_bundle
from lathe.measure import describe_cpu, versions
from lathe.runs.export_model import open_export_model

PIXELS = ("data.image_size=32", "data.channels=3", "data.mean=[0.5,0.5,0.5]", "data.std=[0.25,0.25,0.25]")
SHORT = ("trainer.max_epochs=1", *(f"trainer.limit_{split}_batches=1" for split in ("val", "test")))
RUN = ("data=synthetic", "model=resnet18", *PIXELS, "data.batch_size=32", *SHORT, "trainer.limit_train_batches=2")
FILES = {  # by form, overrides of scripts/export.py
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
CLOCKS = ("wall", "cpu")
Rounds = list[dict[str, dict[str, float]]]  # by round, form and clock, the median milliseconds


def make(folder: Path, test_size: int) -> tuple[Path, dict[str, dict[str, Any]]]:
    """Return the run, and by form its export's folder, bytes, and seconds of the command (None if it was there)."""
    if not (folder / "latest").exists():
        run_timed("train.py", *RUN, *QUIET, f"data.source.test_size={test_size}", f"paths.log_dir={folder}")
        print("the run is made", file=sys.stderr, flush=True)
    run = (folder / "latest").resolve()
    found: dict[str, dict[str, Any]] = {}
    for form, words in FILES.items():
        kept, seconds = run / "forms" / form.replace(", ", "_"), None
        if not kept.exists():
            seconds = run_timed("scripts/export.py", f"run={run}", *words)
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


def time_calls(
    calls: Mapping[str, Callable[[], Any]], repeats: int, draw: random.Random
) -> dict[str, dict[str, float]]:
    """Return the median milliseconds of each call by clock; calls are interleaved, each after one to warm up."""
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
        name: {clock: 1e3 * statistics.median(of) for clock, of in zip(CLOCKS, zip(*pairs, strict=True), strict=True)}
        for name, pairs in times.items()
    }


def measure(run: Path, exports: dict[str, dict[str, Any]], rounds: int) -> dict[int, Rounds]:
    """Return the medians of each round, by batch."""
    torch.set_num_threads(1)
    net = open_export_model(run).net
    forms: dict[str, Callable[[Any], Any]] = {form: open_bundle(one["folder"], 1) for form, one in exports.items()}
    forms[EAGER] = lambda x: net(torch.from_numpy(x))
    draw, noise = random.Random(0), np.random.default_rng(0)  # noqa: S311  # an order, not a secret
    found: dict[int, Rounds] = {}
    with torch.no_grad():
        for batch, repeats in CALLS.items():
            pixels = noise.integers(0, 256, (batch, 3, 32, 32), dtype=np.uint8)
            calls = {form: partial(call, pixels) for form, call in forms.items()}
            for call in calls.values():
                for _ in range(4):
                    call()
            found[batch] = [time_calls(calls, repeats, draw) for _ in range(rounds)]
            print(f"batch {batch} is measured", file=sys.stderr, flush=True)
    return found


def of_eager(rounds: Rounds, form: str, clock: str) -> Spread:
    """Return times over eager's, round by round."""
    return divide([one[form][clock] for one in rounds], [one[EAGER][clock] for one in rounds])


def verdicts(found: dict[int, Rounds], exports: dict[str, dict[str, Any]], clock: str) -> list[str]:
    """Return a line for each bar."""
    share = of_eager(found[1], "aot_inductor", clock).median
    text = f"AOTInductor, float32, batch 1: {share:.2f} of eager's {clock} time, bar {AOT}"
    lines = [f"- {text}: {verdict(share <= AOT)}"]
    for batch, bar in INT8.items():
        speeds = {form: 1 / of_eager(found[batch], form, clock).median for form in ("onnx_int8", "aot_inductor, int8")}
        best = max(speeds, key=lambda form: speeds[form])
        text = f"int8, batch {batch}: {speeds[best]:.2f} times as fast as eager ({best}), bar {bar}"
        lines.append(f"- {text}: {verdict(speeds[best] >= bar)}")
    made = {form: entry["seconds"] for form, entry in exports.items() if entry["seconds"] is not None}
    if made:
        slowest = max(made, key=lambda form: made[form])
        text = f"export with its comparison: {made[slowest]:.0f} s at most ({slowest}), bar {SECONDS:.0f} s"
        lines.append(f"- {text}: {verdict(made[slowest] <= SECONDS)}")
    return lines


def main() -> None:
    made = parser(__doc__, rounds=5)
    made.add_argument("--test-size", type=int, default=1000, help="held-out images that each export is compared on")
    made.add_argument("--clock", choices=CLOCKS, default="wall", help="the clock of the verdicts")
    made.add_argument("--folder", type=Path, help="where the run and its exports are kept and looked for")
    made.add_argument("--json", type=Path, help="a file for all figures")
    options = made.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        run, exports = make((options.folder or Path(temporary)).resolve(), options.test_size)
        found = measure(run, exports, options.rounds)
    lines = []
    for batch, rounds in found.items():
        for form in (EAGER, *exports):
            size = str(exports[form]["bytes"]) if form in exports else ""
            times = [(Spread([one[form][clock] for one in rounds]), of_eager(rounds, form, clock)) for clock in CLOCKS]
            lines.append([form, size, str(batch), *(f"{spread:.2f}" for pair in times for spread in pair)])
    print(table(["form", "bytes", "batch", "ms, wall", "of eager's", "ms, CPU", "of eager's"], lines))
    lines = []
    for form, entry in exports.items():
        whole = "" if entry["seconds"] is None else f"{entry['seconds']:.1f}"
        parts = [f"{entry[key]:.1f}" for key in ("export_seconds", "parity_seconds")]
        lines.append([form, whole, *parts, f"{entry['difference']:.1e}", f"{entry['agreement']:.4f}"])
    print(table(["form", "command, s", "of it export", "of it comparison", "difference", "agreement"], lines))
    print("\n".join(verdicts(found, exports, options.clock)))
    machine = describe_machine("torch", "onnxruntime")
    print(f"\nn = {options.rounds} rounds, one thread; {machine}; {time.monotonic() - began:.0f} s.")
    write_json(options.json, {"rounds": found, "exports": exports, "cpu": describe_cpu(), "versions": versions()})


if __name__ == "__main__":
    main()
