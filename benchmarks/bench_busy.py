"""Training and inference on CPUs that other programs use too: Lathe's defaults compared with one setting at a time.

    python benchmarks/bench_busy.py --rounds 5 --others 0 2 6

Other processes count as fast as they can. For each number of them, each side runs each workload once per round, in
turns. Seconds are the median epoch of a training. A side is a process that has imported everything, since
GOMP_SPINCOUNT is read when torch is loaded.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from typing import Any

from common import QUIET, divide, parser
from suites.results import Spread, table

GPT = ["model=gpt_nano", "data=synthetic_tokens", "optimizer=adamw"]
TRAINING = {  # overrides
    "default command": ["trainer.max_epochs=3"],
    "resnet18": ["model=resnet18", "model.net.width=32", "trainer.max_epochs=2"],
    "mlp": ["model=mlp", "trainer.max_epochs=20"],
    "gpt": [*GPT, "trainer.max_epochs=3", "trainer.limit_train_batches=20"],
    "ddp, 2 ranks": ["strategy=ddp", "trainer.devices=2", "trainer.max_epochs=3"],
}
BASE = "defaults"
SIDES: dict[str, tuple[list[str], dict[str, str]]] = {  # overrides and environment variables
    BASE: ([], {}),
    "as without Lathe": (["launch.threads=null"], {"GOMP_SPINCOUNT": "300000"}),  # libgomp's default
    "long spin": ([], {"GOMP_SPINCOUNT": "300000"}),
    "one thread": (["launch.threads=1"], {}),
}


def serve_side(overrides: list[str]) -> None:
    """Run the workloads named on standard input, one per line; print the seconds and threads of each."""
    import lathe

    with tempfile.TemporaryDirectory() as folder:
        for line in sys.stdin:
            run = lathe.train([*TRAINING[line.strip()], *QUIET, *overrides, f"paths.log_dir={folder}"])
            figures = {"seconds": run.result["epoch_s"], "threads": run.config["launch"]["threads"]}
            print("answer", json.dumps(figures), flush=True)


class Side:
    """A process that runs workloads one at a time."""

    def __init__(self, name: str) -> None:
        overrides, variables = SIDES[name]
        command = [sys.executable, __file__, "--side", json.dumps(overrides)]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen(command, env={**os.environ, **variables}, text=True, **pipes)  # noqa: S603

    def run(self, workload: str) -> dict[str, Any]:
        """Return the seconds and threads of a workload."""
        assert self.process.stdout is not None
        print(workload, file=self.process.stdin, flush=True)
        for line in self.process.stdout:
            if line.startswith("answer "):
                return dict(json.loads(line.removeprefix("answer ")))
        raise RuntimeError(f"the side ended with exit code {self.process.wait()}")


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row for each run of a side."""
    rows: list[dict[str, Any]] = []
    names = [BASE, *(name for name in options.sides if name != BASE)]
    for count in options.others:
        busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
        try:
            time.sleep(options.settle)  # until the load average includes them
            sides = {name: Side(name) for name in names}  # under this load, which their defaults depend on
            for side in sides.values():
                for workload in options.workloads:
                    side.run(workload)  # imports, caches
            for number in range(options.rounds):
                for workload in options.workloads:
                    for name in sides if number % 2 else reversed(sides):
                        row = {"workload": workload, "others": count, "side": name, "round": number}
                        rows.append({**row, **sides[name].run(workload)})
                        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
            for side in sides.values():
                side.process.kill()
                side.process.wait()
        finally:
            for process in busy:
                process.kill()
                process.wait()
    return rows


def summarize(rows: list[dict[str, Any]]) -> str:
    """Return a table of seconds, and their ratios to the defaults under the same load and to those on idle cores."""
    seconds: dict[tuple[str, int, str], list[float]] = {}
    threads: dict[tuple[str, int, str], set[str]] = {}
    for row in rows:
        key = (row["workload"], row["others"], row["side"])
        seconds.setdefault(key, []).append(row["seconds"])
        threads.setdefault(key, set()).add(str(row["threads"]))
    cores, lines = os.cpu_count() or 1, []
    for (workload, others, side), values in seconds.items():
        idle = Spread(seconds.get((workload, 0, BASE), [float("nan")])).median
        used = ", ".join(sorted(threads[workload, others, side]))
        first = [workload, str(others), side, used, str(len(values))]
        shown = [f"{Spread(values):.2f}", f"{divide(values, seconds[workload, others, BASE]):.2f}"]
        lines.append([*first, *shown, f"{Spread(values).median / idle:.1f}", f"{(cores + others) / cores:.1f}"])
    head = ["workload", "others", "side", "threads", "n", "seconds", "over defaults", "over idle", "fair"]
    return table(head, lines)


def main() -> None:
    arguments = parser(__doc__, rounds=5)
    arguments.add_argument("--others", type=int, nargs="+", default=[0, 2, 6], help="other processes (default 0 2 6)")
    arguments.add_argument("--sides", nargs="+", default=list(SIDES)[:2], choices=SIDES, help="default: the first two")
    arguments.add_argument("--workloads", nargs="+", default=[*TRAINING], choices=TRAINING)
    arguments.add_argument("--settle", type=float, default=60.0, help="seconds before a number of others is measured")
    arguments.add_argument("--side", help=argparse.SUPPRESS)
    options = arguments.parse_args()
    if options.side is not None:
        serve_side(json.loads(options.side))
        return
    text = summarize(measure(options))
    print(f"{os.cpu_count()} CPUs. A fair share of them takes (CPUs + others) / CPUs of the idle seconds.\n\n{text}")


if __name__ == "__main__":
    main()
