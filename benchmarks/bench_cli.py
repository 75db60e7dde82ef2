"""Start-up benchmark: CPU seconds of the command line over those of `import lightning.pytorch`, in turns.

    python benchmarks/bench_cli.py --rounds 9

Each round runs every command once, so that a machine whose speed drifts hurts all sides alike. CPU time is user plus
system time of the child and its children. The bar: 0.10 for --help, --cfg job and a bad override, none of which may
import torch.
"""

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TRAIN = [sys.executable, str(ROOT / "train.py")]
BASE = "import lightning.pytorch"
COMMANDS = {
    BASE: [sys.executable, "-c", BASE],
    "import hydra": [sys.executable, "-c", "import hydra"],
    "train.py --help": [*TRAIN, "--help"],
    "train.py --cfg job": [*TRAIN, "--cfg", "job"],
    "train.py optimizer.lrr=1": [*TRAIN, "optimizer.lrr=1"],
}


def cpu_seconds(command: list[str]) -> float:
    """Return user plus system seconds of one run of `command`."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"})  # noqa: S603 - our own commands
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def imports_torch(command: list[str]) -> bool:
    """Return whether `command` imports torch, by `-X importtime`."""
    done = subprocess.run([command[0], "-X", "importtime", *command[1:]], capture_output=True, text=True)  # noqa: S603
    return any(line.rsplit("|", 1)[-1].strip() == "torch" for line in done.stderr.splitlines())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="runs of each command (default 9)")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    for command in COMMANDS.values():
        cpu_seconds(command)  # fills the file and bytecode caches
    seconds: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(options.rounds):
        for name, command in COMMANDS.items():
            seconds[name].append(cpu_seconds(command))
    versions = {package: metadata.version(package) for package in ("torch", "lightning", "hydra-core")}
    print(
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, "
        f"{versions}"
    )
    print(
        f"{'command':28} {'CPU s':>7} {'min':>7} {'max':>7} {'ratio':>7} {'min':>6} {'max':>6}  torch   (medians, "
        f"n={options.rounds})"
    )
    table = {}
    for name, command in COMMANDS.items():
        ratios = [mine / base for mine, base in zip(seconds[name], seconds[BASE], strict=True)]
        row = {
            "seconds": statistics.median(seconds[name]),
            "ratio": statistics.median(ratios),
            "min": min(ratios),
            "max": max(ratios),
            "imports_torch": imports_torch(command),
        }
        table[name] = row
        print(
            f"{name:28} {row['seconds']:7.3f} {min(seconds[name]):7.3f} {max(seconds[name]):7.3f} {row['ratio']:7.3f} "
            f"{row['min']:6.3f} {row['max']:6.3f}  {'yes' if row['imports_torch'] else 'no'}"
        )
    if options.json:
        options.json.write_text(
            json.dumps({"rounds": options.rounds, "versions": versions, "rows": table}, indent=2) + "\n"
        )


if __name__ == "__main__":
    main()
