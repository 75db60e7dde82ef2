"""Training and inference on CPUs that other programs use too: Lathe's defaults compared with one setting at a time.

    python benchmarks/bench_busy.py --rounds 5 --others 0 2 6

Other processes count as fast as they can. For each number of them, each side runs each workload once per round, in
turns. Seconds are the median epoch of a training, and 100 batches of an inference. A side is a process that has
imported everything, since GOMP_SPINCOUNT is read when torch is loaded.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import QUIET, divide, parser, run
from suites.results import Spread, table

GPT = ["model=gpt_nano", "data=synthetic_tokens", "optimizer=adamw"]
TRAINING = {  # overrides
    "default command": ["trainer.max_epochs=3"],
    "resnet18": ["model=resnet18", "model.net.width=32", "trainer.max_epochs=2"],
    "mlp": ["model=mlp", "trainer.max_epochs=20"],
    "gpt": [*GPT, "trainer.max_epochs=3", "trainer.limit_train_batches=20"],
    "ddp, 2 ranks": ["strategy=ddp", "trainer.devices=2", "trainer.max_epochs=3"],
}
INT8 = "onnx_int8, batch 32"
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
    from lathe.export import get

    folder, model = tempfile.mkdtemp(), None
    for line in sys.stdin:
        name = line.strip()
        if name == INT8:
            import numpy as np
            import torch

            model = model or get("onnx_int8").load(Path(os.environ["BENCH_INT8"]))
            x = np.random.default_rng(0).integers(0, 256, (32, 1, 16, 16), dtype=np.uint8)
            model(x)
            began = time.perf_counter()
            for _ in range(100):
                model(x)
            answer = {"seconds": time.perf_counter() - began, "threads": torch.get_num_threads()}
        else:
            done = lathe.train([*TRAINING[name], *QUIET, *overrides, f"paths.log_dir={folder}", "name=busy"])
            answer = {"seconds": done.result["epoch_s"], "threads": done.config["launch"]["threads"]}
        print("answer", json.dumps(answer), flush=True)


class Side:
    """A process that runs workloads one at a time."""

    def __init__(self, name: str, int8: Path) -> None:
        overrides, variables = SIDES[name]
        environment = {**os.environ, **variables, "BENCH_INT8": str(int8)}
        command = [sys.executable, __file__, "--side", json.dumps(overrides)]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen(command, env=environment, text=True, **pipes)  # noqa: S603 - this file

    def run(self, workload: str) -> dict[str, Any]:
        """Return the seconds and threads of a workload."""
        assert self.process.stdout is not None
        print(workload, file=self.process.stdin, flush=True)
        for line in self.process.stdout:
            if line.startswith("answer "):
                return dict(json.loads(line.removeprefix("answer ")))
        raise RuntimeError(f"the side ended with exit code {self.process.wait()}")


def export_int8(folder: Path) -> Path:
    """Return an integer ONNX file of a briefly trained ResNet-18 on 16 x 16 pixels."""
    words = ("data=synthetic", "model=resnet18", "trainer.max_epochs=1", "trainer.limit_train_batches=2")
    run("train.py", *words, *QUIET, f"paths.log_dir={folder}", "name=int8")
    run("scripts/export.py", f"run={folder}/latest", "target=onnx_int8")
    return next(folder.glob("int8/*/exports/*int8*/*.onnx"))


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row for each run of a side."""
    rows: list[dict[str, Any]] = []
    names = [BASE, *(name for name in options.sides if name != BASE)]
    with tempfile.TemporaryDirectory() as folder:
        int8 = export_int8(Path(folder)) if INT8 in options.workloads else Path()
        for count in options.others:
            busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
            try:
                time.sleep(options.settle)  # until the load average includes them
                sides = {name: Side(name, int8) for name in names}  # under this load, which their defaults depend on
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
    by_side: dict[tuple[str, int, str], list[dict[str, Any]]] = {}
    for row in rows:
        by_side.setdefault((row["workload"], row["others"], row["side"]), []).append(row)
    seconds = {key: [row["seconds"] for row in side_rows] for key, side_rows in by_side.items()}
    cores, lines = os.cpu_count() or 1, []
    for (workload, others, side), values in seconds.items():
        idle = Spread(seconds.get((workload, 0, BASE), [float("nan")])).median
        threads = sorted({str(row["threads"]) for row in by_side[workload, others, side]})
        first = [workload, str(others), side, ", ".join(threads), str(len(values))]
        shown = [f"{Spread(values):.2f}", f"{divide(values, seconds[workload, others, BASE]):.2f}"]
        lines.append([*first, *shown, f"{Spread(values).median / idle:.1f}", f"{(cores + others) / cores:.1f}"])
    head = ["workload", "others", "side", "threads", "n", "seconds", "over defaults", "over idle", "fair"]
    return table(head, lines)


def main() -> None:
    arguments = parser(__doc__, rounds=5)
    arguments.add_argument("--others", type=int, nargs="+", default=[0, 2, 6], help="other processes (default 0 2 6)")
    arguments.add_argument("--sides", nargs="+", default=list(SIDES)[:2], choices=SIDES, help="default: the first two")
    arguments.add_argument("--workloads", nargs="+", default=[*TRAINING, INT8], choices=[*TRAINING, INT8])
    arguments.add_argument("--settle", type=float, default=60.0, help="seconds before each number of others")
    arguments.add_argument("--side", help=argparse.SUPPRESS)
    options = arguments.parse_args()
    if options.side is not None:
        serve_side(json.loads(options.side))
        return
    text = summarize(measure(options))
    print(f"{os.cpu_count()} CPUs. A fair share of them takes (CPUs + others) / CPUs of the idle seconds.\n\n{text}")


if __name__ == "__main__":
    main()
