"""Start-up: CPU seconds of the command line compared with those of `import lightning.pytorch`.

    python benchmarks/bench_cli.py --rounds 9

Commands run in turns, once per round. CPU time is user plus system time of the process and its children. The bar: 0.10
for --help, --cfg job and a mistyped key, none of which may import torch.
"""

import os
import subprocess
import sys
from pathlib import Path

from common import ROOT, cpu_seconds, describe_machine, divide, parser, write_json
from suites.results import Spread, table

TRAIN = [sys.executable, str(ROOT / "train.py")]
BASE = "import lightning.pytorch"
COMMANDS = {
    BASE: [sys.executable, "-c", BASE],
    "import hydra": [sys.executable, "-c", "import hydra"],
    "train.py --help": [*TRAIN, "--help"],
    "train.py --cfg job": [*TRAIN, "--cfg", "job"],
    "train.py optimizer.lrr=1": [*TRAIN, "optimizer.lrr=1"],
}


def spend(command: list[str]) -> float:
    """Return the CPU seconds of one run of `command`."""
    before = cpu_seconds()
    subprocess.run(command, capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"})  # noqa: S603 - ours
    return cpu_seconds() - before


def imports_torch(command: list[str]) -> bool:
    """Return whether `command` imports torch, by `-X importtime`."""
    done = subprocess.run([command[0], "-X", "importtime", *command[1:]], capture_output=True, text=True)  # noqa: S603
    return any(line.rsplit("|", 1)[-1].strip() == "torch" for line in done.stderr.splitlines())


def main() -> None:
    made = parser(__doc__, rounds=9)
    made.add_argument("--json", type=Path, help="also write the figures to this file")
    options = made.parse_args()
    for command in COMMANDS.values():
        spend(command)  # fills the file and bytecode caches
    seconds: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(options.rounds):
        for name, command in COMMANDS.items():
            seconds[name].append(spend(command))
    lines, figures = [], {}
    for name, command in COMMANDS.items():
        ratio, torch = divide(seconds[name], seconds[BASE]), imports_torch(command)
        lines.append([name, f"{Spread(seconds[name])}", f"{ratio}", "yes" if torch else "no"])
        figures[name] = {"seconds": seconds[name], "ratio": ratio.median, "imports_torch": torch}
    machine = describe_machine("torch", "lightning", "hydra-core")
    print(f"{machine}; n = {options.rounds}\n\n{table(['command', 'CPU s', 'over the first', 'torch'], lines)}")
    write_json(options.json, {"rounds": options.rounds, "machine": machine, "rows": figures})


if __name__ == "__main__":
    main()
