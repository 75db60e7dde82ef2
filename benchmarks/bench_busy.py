"""Training on a CPU that does other things as well: samples per second with the threads that torch takes by itself,
with one, and with threads that soon sleep when they wait for each other, in turns.

    python benchmarks/bench_busy.py --rounds 3

Each round runs each side once beside each number of other processes, which count as fast as they can.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RUNS = {
    "mlp": ["model=mlp", "model.net.width=16", "model.net.depth=1", "data.batch_size=64", "trainer.max_epochs=3"],
    "resnet20": ["trainer.max_epochs=3"],
}

BASE = "torch's own"
SIDES: dict[str, tuple[list[str], dict[str, str]]] = {  # words and variables of each
    BASE: ([], {}),
    "launch.threads=1": (["launch.threads=1"], {}),
    # libgomp's threads spin for 300,000 rounds, three milliseconds by its own estimate, before they sleep
    "GOMP_SPINCOUNT=10000": ([], {"GOMP_SPINCOUNT": "10000"}),
}


def samples_per_s(words: list[str], variables: dict[str, str]) -> float:
    """What the run's closing table says."""
    with tempfile.TemporaryDirectory() as folder:
        words = [*words, "trainer.accelerator=cpu", "trainer.enable_progress_bar=false", f"paths.log_dir={folder}"]
        environment = {**os.environ, **variables}
        command = [sys.executable, str(ROOT / "train.py"), *words]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)  # noqa: S603 - our own
    found = re.search(r"samples/s\D+([\d,]+)", done.stdout)
    assert found is not None, done.stdout
    return float(found[1].replace(",", ""))


def measured(rounds: int, others: list[int]) -> dict[tuple[str, int, str], list[float]]:
    """Of each run, number of other processes and side: samples per second of each round."""
    found: dict[tuple[str, int, str], list[float]] = {}
    for _ in range(rounds):
        for count in others:
            busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
            try:
                for run, words in RUNS.items():
                    for side, (more, variables) in SIDES.items():
                        found.setdefault((run, count, side), []).append(samples_per_s([*words, *more], variables))
            finally:
                for process in busy:
                    process.kill()
                    process.wait()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="runs of each side (default 3)")
    parser.add_argument("--others", type=int, nargs="+", default=[0, 1, 2], help="other processes (default 0 1 2)")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    found = measured(options.rounds, options.others)
    print(f"{os.cpu_count()} cores; samples per second, medians of n={options.rounds}, and over torch's own threads")
    print(
        f"{'run':10} {'others':>6} {'side':22} {'median':>9} {'min':>9} {'max':>9} {'ratio':>7} {'min':>7} {'max':>7}"
    )
    for (run, count, side), values in found.items():
        ratios = [mine / base for mine, base in zip(values, found[run, count, BASE], strict=True)]
        row = f"{statistics.median(values):9.0f} {min(values):9.0f} {max(values):9.0f}"
        print(
            f"{run:10} {count:6} {side:22} {row} {statistics.median(ratios):7.2f} {min(ratios):7.2f} {max(ratios):7.2f}"
        )
    if options.json:
        options.json.write_text(json.dumps([[*key, values] for key, values in found.items()], indent=1) + "\n")


if __name__ == "__main__":
    main()
