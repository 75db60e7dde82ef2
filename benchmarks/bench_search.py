"""Search benchmark: asynchronous successive halving (Li et al. 2020, arXiv:1810.05934) against the whole grid that it
draws from, on the real Fashion-MNIST: what it finds, and the optimizer steps that it takes.

    python benchmarks/bench_search.py --seeds 1 2 3 --folder /usr/share/datasets/fashion-mnist

Both sides are the same 27 configurations with the same seeds, so a run that is not ended early is
bit-equal to the grid's. Bars: 0.4 of the grid's steps, and 0.3 points of validation accuracy below the grid's best.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SPACE = (
    "sweep.space={optimizer.lr: [0.01, 0.05, 0.2], optimizer.weight_decay: [0.0, 0.0001, 0.001], "
    "model.net.width: [32, 64, 128]}"
)
CONFIGURATIONS = 27


def search(pruner: str, seed: int, epochs: int, images: str) -> list[dict[str, Any]]:
    """Return the result.json of each run of the search."""
    words = [
        "sweep=optuna",
        SPACE,
        "sweep.sampler=grid",
        f"sweep.pruner={pruner}",
        "data=fashion_mnist",
        f"data.source.folder={images}",
        f"paths.data_dir={Path(tempfile.gettempdir()) / 'lathe_bench_search'}",
        "model=mlp",
        f"trainer.max_epochs={epochs}",
        "trainer.accelerator=cpu",
        "trainer.enable_progress_bar=false",
        f"seed={seed}",
    ]
    with tempfile.TemporaryDirectory() as folder:
        line = [sys.executable, str(ROOT / "train.py"), "-m", *words]
        subprocess.run(line, cwd=folder, check=True, capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"})  # noqa: S603
        found = [json.loads(path.read_text()) for path in Path(folder).glob("logs/train/*/result.json")]
    assert len(found) == CONFIGURATIONS, len(found)
    return found


def best_of(results: list[dict[str, Any]]) -> dict[str, Any]:
    return max((result for result in results if "pruned" not in result), key=lambda result: result["objective"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="seeds of the runs (default 1 2 3)")
    parser.add_argument("--epochs", type=int, default=9, help="of a run that is not ended early (default 9)")
    parser.add_argument("--folder", required=True, help="of the four IDX files of Fashion-MNIST")
    options = parser.parse_args()
    versions = {package: metadata.version(package) for package in ("torch", "lightning", "optuna")}
    print(f"{platform.machine()}, Python {platform.python_version()}, {versions}, {options.epochs} epochs")
    shares, behind = [], []
    for seed in options.seeds:
        grid, asha = (search(pruner, seed, options.epochs, options.folder) for pruner in ("none", "asha"))
        steps = [sum(result["steps"] for result in side) for side in (grid, asha)]
        best = [best_of(side) for side in (grid, asha)]
        shares.append(steps[1] / steps[0])
        behind.append(100 * (best[0]["objective"] - best[1]["objective"]))
        ended = sum("pruned" in result for result in asha)
        print(
            f"seed {seed}: {steps[1]:,} of {steps[0]:,} steps ({shares[-1]:.2f}), {ended} runs ended early; best "
            f"val/accuracy {best[1]['objective']:.4f} (test {best[1]['test/accuracy']:.4f}), of the grid "
            f"{best[0]['objective']:.4f} (test {best[0]['test/accuracy']:.4f})",
            flush=True,
        )
    for name, values, bar in (("share of the grid's steps", shares, 0.4), ("points below its best", behind, 0.3)):
        print(f"{name}: {statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f}; bar {bar})")


if __name__ == "__main__":
    main()
