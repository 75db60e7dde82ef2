"""suite=cli: CPU seconds of the command line, its start-up, compared with those of `import lightning.pytorch`.

CPU time is user plus system time of the process and its children. No command here may import torch.
"""

import os
import resource
import subprocess
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from lathe.measure import plot
from suites.results import Columns, Facts, Results, Threshold, fact
from suites.runner import take_turns

TRAIN = [sys.executable, str(Path(__file__).resolve().parents[2] / "train.py")]
BASE = "import lightning.pytorch"
COMMANDS = {
    BASE: [sys.executable, "-c", BASE],
    "import hydra": [sys.executable, "-c", "import hydra"],
    "train.py --help": [*TRAIN, "--help"],
    "train.py --cfg job": [*TRAIN, "--cfg", "job"],
    "train.py optimizer.lrr=1": [*TRAIN, "optimizer.lrr=1"],
}
LIMITS = {"train.py --help": 0.10, "train.py --cfg job": 0.10, "train.py optimizer.lrr=1": 0.16}


def _run(command: list[str]) -> dict[str, float]:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"})  # noqa: S603 - ours
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {"cpu_s": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime}


def _imports_torch(command: list[str]) -> bool:
    """Return whether `command` imports torch, by `-X importtime`."""
    done = subprocess.run([command[0], "-X", "importtime", *command[1:]], capture_output=True, text=True)  # noqa: S603
    return any(line.rsplit("|", 1)[-1].strip() == "torch" for line in done.stderr.splitlines())


def measure(request: Mapping[str, Any], output: Path) -> tuple[Facts, Results]:
    """Measure the CPU seconds of each command in each round."""
    sides = {name: partial(_run, command) for name, command in COMMANDS.items()}
    facts = {name: {"torch": "yes" if _imports_torch(command) else "no"} for name, command in COMMANDS.items()}
    take_turns(sides, 1, quiet=True)  # fills the file and bytecode caches
    return facts, take_turns(sides, request["rounds"])


def tables(facts: Facts, results: Results, request: Mapping[str, Any]) -> tuple[list[str], str]:
    """Return a row for each command."""
    columns: Columns = {
        "command": str,
        "CPU s": results.cells("cpu_s", ".3f"),
        "over the first": results.over(BASE, "cpu_s"),
        "imports torch": fact(facts, "torch"),
    }
    return [results.table(columns)], plot.stacks("CPU time of a command", "s", results.medians("CPU s", "cpu_s"))


def claims(results: Results) -> list[Threshold]:
    """Return the limits of commands that train nothing."""
    ratios = {name: results.ratio(name, BASE, "cpu_s") for name in LIMITS}
    return [Threshold(f"{name}: over {BASE},", ratios[name], at_most=limit) for name, limit in LIMITS.items()]
