"""What compression costs in accuracy and gives in size, by the real commands.

    python benchmarks/bench_compression.py --rounds 3

Every round has a seed. A dense ResNet-20 of width 8 is trained on the digits at 32x32; each method then starts from its
weights and trains as long again. Figures are those of the test split for the epoch that validation chose, as
differences from the dense run of the same seed, in points; sizes are those of the receipt. The last rows are a
synthetic task that a small net can't learn alone: a teacher, the small net, and the small net with the teacher. Runs go
through the real commands, as many at a time as `--jobs` says, one thread each.
"""

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
NET = (
    "model=resnet20",
    "model.net.width=8",
    "data.image_size=32",
    "data.eval_batch_size=100",
    "trainer.accelerator=cpu",
    "trainer.enable_progress_bar=false",
    "trainer.enable_model_summary=false",
)
UNMEASURED = "compression.receipt=none"  # a receipt takes as long as the run
METHODS = {
    "prune 80 %": ("compression=prune", "compression.prune.sparsity=0.8", UNMEASURED),
    "prune 90 %": ("compression=prune", "compression.prune.sparsity=0.9", UNMEASURED),
    "prune_nm 2:4": ("compression=prune_nm", UNMEASURED),
    "prune_channels, half of the MACs": ("compression=prune_channels",),
    "qat": ("compression=qat",),
    "distill, prune 50 %, qat": ("compression=[distill,prune,qat]", "compression.prune.sparsity=0.5"),
}
# Points of accuracy that may be lost.
LIMITS = {
    "prune 80 %": 0.5,
    "prune 90 %": 1.5,
    "prune_channels, half of the MACs": 0.5,
    "qat": 0.5,
    "ptq_static": 0.5,
    "distill, prune 50 %, qat": 1.0,
}


class Bench:
    def __init__(self, folder: Path, seed: int, epochs: int) -> None:
        self.folder, self.seed, self.epochs = folder, seed, epochs

    def command(self, script: str, name: str, *arguments: str) -> Path:
        """Run a real command; return the directory of its run."""
        log_dir = self.folder / str(self.seed) / re.sub(r"\W+", "_", name)
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        words = [sys.executable, str(ROOT / script), *arguments, f"paths.log_dir={log_dir}"]
        done = subprocess.run(words, cwd=self.folder, env=environment, capture_output=True, text=True)  # noqa: S603
        if done.returncode:
            raise SystemExit(f"{name}, seed {self.seed}: {done.stdout[-2000:]}\n{done.stderr[-3000:]}")
        directories = [path.parent for path in log_dir.glob("*/*/result.json") if not path.parent.parent.is_symlink()]
        # compress.py puts its run next to the dense one
        directory = max({path.resolve() for path in directories}, key=lambda path: path.name)
        print(f"seed {self.seed}: {name}", file=sys.stderr, flush=True)
        return Path(directory)

    def run(self) -> dict[str, Path]:
        """Return all runs of one seed by name."""
        fixed = (*NET, f"seed={self.seed}", f"trainer.max_epochs={self.epochs}")
        dense = self.command("train.py", "dense", *fixed)
        found = {"dense": dense}
        for name, overrides in METHODS.items():
            teacher = (f"compression.distill.teacher={dense}",) if "distill" in name else ()
            found[name] = self.command(
                "train.py", name, *fixed, "optimizer.lr=0.05", f"ckpt_path={dense}", *overrides, *teacher
            )
        found["ptq_static"] = self.command(
            "scripts/compress.py", "dense", f"run={dense}", "compression=ptq_static", UNMEASURED
        )
        found["teacher"] = self.command("train.py", "teacher", "experiment=synthetic_kd_teacher", f"seed={self.seed}")
        found["student"] = self.command(
            "train.py", "student", "experiment=synthetic_kd", "compression.distill=null", f"seed={self.seed}"
        )
        found["student, taught"] = self.command(
            "train.py",
            "taught",
            "experiment=synthetic_kd",
            f"seed={self.seed}",
            f"compression.distill.teacher={found['teacher']}",
            UNMEASURED,
        )
        return found


def read(directory: Path) -> dict[str, Any]:
    result = json.loads((directory / "result.json").read_text())
    receipt = directory / "receipt.json"
    return {
        "accuracy": 100 * result["test/accuracy"],
        "receipt": json.loads(receipt.read_text()) if receipt.exists() else None,
    }


def spread(values: list[float]) -> str:
    sd = statistics.stdev(values) if len(values) > 1 else float("nan")
    return f"{statistics.mean(values):.2f} ± {sd:.2f} ({min(values):.2f} to {max(values):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="seeds, from 1 on")
    parser.add_argument("--epochs", type=int, default=15, help="of the dense run, and of each method after it")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="seeds that run at the same time")
    parser.add_argument("--json", type=Path, help="a file for all figures")
    options = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.jobs) as pool:
        benches = [Bench(Path(folder), seed, options.epochs) for seed in range(1, options.rounds + 1)]
        seeds = [{name: read(path) for name, path in runs.items()} for runs in pool.map(Bench.run, benches)]
    lines = [
        "| run | test accuracy, % | points from dense | bytes of dense, gzipped over plain | |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name in seeds[0]:
        accuracies = [seed[name]["accuracy"] for seed in seeds]
        gains = [seed[name]["accuracy"] - seed["dense"]["accuracy"] for seed in seeds]
        own = name not in ("teacher", "student", "student, taught")
        met = ("met" if statistics.mean(gains) >= -LIMITS[name] else "missed") if name in LIMITS else ""
        limit = f", bar -{LIMITS[name]}" if name in LIMITS else ""
        lines.append(
            f"| {name} | {spread(accuracies)} | {spread(gains) + limit if own and name != 'dense' else ''} | "
            f"{sizes(seeds, name)} | {met} |"
        )
    closed = [
        (s["student, taught"]["accuracy"] - s["student"]["accuracy"])
        / (s["teacher"]["accuracy"] - s["student"]["accuracy"])
        for s in seeds
    ]
    lines += ["", f"Share of the gap between student and teacher that distillation closes: {spread(closed)}, bar 0.50."]
    packages = ", ".join(
        f"{name} {metadata.version(name)}" for name in ("torch", "lightning", "onnxruntime", "torch-pruning")
    )
    print("\n".join(lines))
    print(
        f"\nn = {options.rounds} seeds, mean ± standard deviation (lowest to highest); {options.epochs} epochs each; "
        f"{packages}; Python {platform.python_version()}; {time.monotonic() - began:.0f} s."
    )
    if options.json:
        options.json.write_text(json.dumps(seeds, indent=2) + "\n")


def sizes(seeds: list[dict[str, Any]], name: str) -> str:
    """Return the gzipped shipped file over the dense run's plain file, from the receipt."""
    found = [seed[name]["receipt"] for seed in seeds]
    return "" if None in found else spread([receipt["bytes_share"] for receipt in found])


if __name__ == "__main__":
    main()
