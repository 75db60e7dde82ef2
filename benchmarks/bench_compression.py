"""Accuracy that compression costs, and size that it saves.

    python benchmarks/bench_compression.py --rounds 3

Every round has a seed. A dense ResNet-20 of width 8 is trained on the digits at 32 x 32; each method then starts from
its weights and trains for as many epochs again. Figures are those of the test split at the epoch that validation chose,
as differences from the dense run of the same seed, in points; sizes are those of the receipt. The last rows are a
synthetic task that a small net can't learn alone: a teacher, the small net, and the small net with the teacher. Runs
are real commands with one thread each; `--jobs` sets the number of seeds that run at the same time.
"""

import json
import os
import re
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from common import QUIET, describe_machine, parser, run, verdict, write_json
from suites.results import table

NET = ("model=resnet20", "model.net.width=8", "data.image_size=32", "data.eval_batch_size=100", *QUIET)
UNMEASURED = "compression.receipt=none"  # a receipt takes as long as the run
METHODS: dict[str, tuple[float | None, tuple[str, ...]]] = {  # points of accuracy that may be lost, and overrides
    "prune 80 %": (0.5, ("compression=prune", "compression.prune.sparsity=0.8", UNMEASURED)),
    "prune 90 %": (1.5, ("compression=prune", "compression.prune.sparsity=0.9", UNMEASURED)),
    "prune_nm 2:4": (None, ("compression=prune_nm", UNMEASURED)),
    "prune_channels, half of the MACs": (0.5, ("compression=prune_channels",)),
    "qat": (0.5, ("compression=qat",)),
    "distill, prune 50 %, qat": (1.0, ("compression=[distill,prune,qat]", "compression.prune.sparsity=0.5")),
}
LIMITS = {**{name: limit for name, (limit, _) in METHODS.items()}, "ptq_static": 0.5}
SYNTHETIC = ("teacher", "student", "student, taught")


def run_seed(folder: Path, seed: int, epochs: int) -> dict[str, dict[str, Any]]:
    """Return the test accuracy in percent and the receipt of all runs of one seed by name."""

    def command(script: str, name: str, *overrides: str) -> Path:
        """Run a command, and return the directory of its run."""
        log_dir = folder / str(seed) / re.sub(r"\W+", "_", name)
        run(script, *overrides, f"paths.log_dir={log_dir}", cwd=folder)
        print(f"seed {seed}: {name}", file=sys.stderr, flush=True)
        runs = {path.parent.resolve() for path in log_dir.glob("*/*/result.json")}
        return max(runs, key=lambda path: path.name)  # compress.py puts its run next to the dense one

    fixed, own = (*NET, f"seed={seed}", f"trainer.max_epochs={epochs}"), f"seed={seed}"
    dense = command("train.py", "dense", *fixed)
    runs = {"dense": dense}
    for name, (_, method) in METHODS.items():
        teacher = (f"compression.distill.teacher={dense}",) if "distill" in name else ()
        runs[name] = command("train.py", name, *fixed, "optimizer.lr=0.05", f"ckpt_path={dense}", *method, *teacher)
    runs["ptq_static"] = command("scripts/compress.py", "dense", f"run={dense}", "compression=ptq_static", UNMEASURED)
    runs["teacher"] = command("train.py", "teacher", "experiment=synthetic_kd_teacher", own)
    student = ("experiment=synthetic_kd", own)
    runs["student"] = command("train.py", "student", *student, "compression.distill=null")
    taught = (f"compression.distill.teacher={runs['teacher']}", UNMEASURED)
    runs["student, taught"] = command("train.py", "taught", *student, *taught)
    return {name: read(path) for name, path in runs.items()}


def read(directory: Path) -> dict[str, Any]:
    """Return the accuracy and the receipt of a run."""
    accuracy = 100 * json.loads((directory / "result.json").read_text())["test/accuracy"]
    receipt = directory / "receipt.json"
    return {"accuracy": accuracy, "receipt": json.loads(receipt.read_text()) if receipt.exists() else None}


def show(values: list[float]) -> str:
    """Return mean, standard deviation and range."""
    deviation = statistics.stdev(values) if len(values) > 1 else float("nan")
    return f"{statistics.mean(values):.2f} ± {deviation:.2f} ({min(values):.2f} to {max(values):.2f})"


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--rounds", type=int, default=3, help="seeds, beginning with 1")
    arguments.add_argument("--epochs", type=int, default=15, help="of the dense run, and of each method after it")
    arguments.add_argument("--jobs", type=int, default=os.cpu_count(), help="seeds that run at the same time")
    arguments.add_argument("--json", type=Path, help="a file for all figures")
    options = arguments.parse_args()
    began, numbers = time.monotonic(), range(1, options.rounds + 1)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.jobs) as pool:
        seeds = list(pool.map(lambda seed: run_seed(Path(folder), seed, options.epochs), numbers))
    lines = []
    for name in seeds[0]:
        gains, limit = [seed[name]["accuracy"] - seed["dense"]["accuracy"] for seed in seeds], LIMITS.get(name)
        cells = [name, show([seed[name]["accuracy"] for seed in seeds])]
        cells.append("" if name in ("dense", *SYNTHETIC) else show(gains) + (f", bar -{limit}" if limit else ""))
        receipts = [seed[name]["receipt"] for seed in seeds]
        cells.append("" if None in receipts else show([receipt["bytes_share"] for receipt in receipts]))
        lines.append([*cells, verdict(statistics.mean(gains) >= -limit) if limit else ""])
    print(table(["run", "test accuracy, %", "points from dense", "bytes of dense, gzipped over plain", ""], lines))
    accuracies = [[seed[name]["accuracy"] for name in SYNTHETIC] for seed in seeds]
    closed = [(taught - student) / (teacher - student) for teacher, student, taught in accuracies]
    print(f"Share of the gap between student and teacher that distillation closes: {show(closed)}, bar 0.50.\n")
    machine = describe_machine("torch", "lightning", "onnxruntime", "torch-pruning")
    print(
        f"n = {options.rounds} seeds, mean ± standard deviation (lowest to highest); {options.epochs} epochs each; "
        f"{machine}; {time.monotonic() - began:.0f} s."
    )
    write_json(options.json, seeds)


if __name__ == "__main__":
    main()
