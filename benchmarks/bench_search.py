"""Search on Fashion-MNIST: asynchronous successive halving (Li et al. 2020, arXiv:1810.05934) and the whole grid.

    python benchmarks/bench_search.py --seeds 1 2 3 --folder /usr/share/datasets/fashion-mnist

Both sides have the same 27 configurations with the same seeds, so a run that is not ended early is bit-equal to the
grid's. Bars: 0.4 of the grid's optimizer steps, and 0.3 points of validation accuracy below the grid's best.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

from common import QUIET, describe_machine, parser, run
from suites.results import Spread

SPACE = (
    "sweep.space={optimizer.lr: [0.01, 0.05, 0.2], optimizer.weight_decay: [0.0, 0.0001, 0.001], "
    "model.net.width: [32, 64, 128]}"
)
CONFIGURATIONS = 27


def search(pruner: str, seed: int, epochs: int, images: str) -> list[dict[str, Any]]:
    """Return the result.json of each run of the search."""
    data_dir = Path(tempfile.gettempdir()) / "lathe_bench_search"
    overrides = ["sweep=optuna", SPACE, "sweep.sampler=grid", f"sweep.pruner={pruner}", f"seed={seed}", *QUIET]
    overrides += ["data=fashion_mnist", f"data.source.folder={images}", f"paths.data_dir={data_dir}"]
    with tempfile.TemporaryDirectory() as folder:
        run("train.py", "-m", *overrides, "model=mlp", f"trainer.max_epochs={epochs}", cwd=folder)
        results = [json.loads(path.read_text()) for path in Path(folder).glob("logs/train/*/result.json")]
    assert len(results) == CONFIGURATIONS, len(results)
    return results


def find_best(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the best result of a run that was not ended early."""
    return max((result for result in results if "pruned" not in result), key=lambda result: result["objective"])


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="seeds of the runs (default 1 2 3)")
    arguments.add_argument("--epochs", type=int, default=9, help="of a run that is not ended early (default 9)")
    arguments.add_argument("--folder", required=True, help="of the four IDX files of Fashion-MNIST")
    options = arguments.parse_args()
    print(f"{describe_machine('torch', 'lightning', 'optuna')}; {options.epochs} epochs")
    shares, points = [], []
    for seed in options.seeds:
        grid, asha = (search(pruner, seed, options.epochs, options.folder) for pruner in ("none", "asha"))
        steps, of = (sum(result["steps"] for result in side) for side in (asha, grid))
        best, whole = find_best(asha), find_best(grid)
        shares.append(steps / of)
        points.append(100 * (whole["objective"] - best["objective"]))
        ended = sum("pruned" in result for result in asha)
        scores = [f"{result['objective']:.4f} (test {result['test/accuracy']:.4f})" for result in (best, whole)]
        print(f"seed {seed}: {steps:,} of {of:,} steps ({shares[-1]:.2f}), {ended} runs ended early; ", end="")
        print(f"best val/accuracy {scores[0]}, of the grid {scores[1]}", flush=True)
    print(f"share of the grid's steps: {Spread(shares):.2f}, bar 0.4")
    print(f"points below its best: {Spread(points):.2f}, bar 0.3")


if __name__ == "__main__":
    main()
