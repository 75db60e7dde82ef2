"""Sweep benchmark: eight jobs in a queue of two against the same eight one after the other, and what a job costs beside
its run.

    python benchmarks/bench_sweep.py --rounds 3
    python benchmarks/bench_sweep.py --rounds 3 --job model=mlp model.net.width=512 trainer.max_epochs=12

A job is `python train.py`, or one with the words of --job: the shorter it is, the more the start of the sweep counts.
Each round runs both sweeps, with one thread a job. A job's cost is the time of the sweep of one slot, less its start
(until the first job is there) and less the seconds that the runs themselves count, over its jobs. Bars, on two cores:
0.6 of the serial time, and 0.5 s a job.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
JOBS = 8
WORDS = ("trainer.accelerator=cpu", "trainer.enable_progress_bar=false", f"seed=range(1,{JOBS + 1})")


def sweep(slots: int, job: list[str]) -> dict[str, float]:
    """Return the seconds of the command, of its start, and of all runs by themselves."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.time()
        line = [sys.executable, str(ROOT / "train.py"), "-m", *WORDS, *job, f"sweep.jobs={slots}"]
        subprocess.run(line, cwd=folder, check=True, capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"})  # noqa: S603
        whole = time.time() - began
        runs = [path.parent for path in Path(folder).glob("logs/train/*/result.json")]
        assert len(runs) == JOBS
        first = min((path / "environment.json").stat().st_mtime for path in runs)
        alone = sum(json.loads((path / "result.json").read_text())["seconds"] for path in runs)
    return {"seconds": whole, "start": first - began, "runs": alone}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="sweeps of each kind (default 3)")
    parser.add_argument("--job", nargs="*", default=[], help="words of a job, such as model=mlp (default none)")
    options = parser.parse_args()
    serial, queued = [], []
    for _ in range(options.rounds):
        serial.append(sweep(1, options.job))
        queued.append(sweep(2, options.job))
    ratios = [two["seconds"] / one["seconds"] for one, two in zip(serial, queued, strict=True)]
    costs = [(one["seconds"] - one["start"] - one["runs"]) / JOBS for one in serial]
    versions = {package: metadata.version(package) for package in ("torch", "lightning", "hydra-core")}
    machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    print(f"{machine}, {versions}, n={options.rounds}")
    for name, values, bar in (("queue of 2 / serial", ratios, 0.6), ("seconds a job beside its run", costs, 0.5)):
        print(f"{name}: {statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f}; bar {bar})")
    seconds = statistics.median(one["seconds"] for one in serial)
    start = statistics.median(one["start"] for one in serial)
    print(f"serial: {seconds:.1f} s, of which {start:.1f} s before the first job")


if __name__ == "__main__":
    main()
