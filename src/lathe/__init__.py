"""Lathe: a Lightning + Hydra research template.

From Python: `lathe.compose`, `lathe.train`, `lathe.load`, `lathe.restore`, `lathe.runs_frame`; for any module
`lathe.compress` and `lathe.export_module` (docs/python.md); and `lathe.Trainer` (docs/speed.md).
"""

import os
from importlib import import_module
from typing import Any


def _spin_count() -> int:
    """Return how many rounds OpenMP's threads (libgomp) spin at a barrier before they sleep.

    On cores that other programs use too, its own 300,000 rounds made training 20 times slower. On idle cores 10,000 are
    up to a quarter slower than 100,000 (benchmarks/bench_busy.py).
    """
    try:
        with open("/proc/loadavg") as file:  # "0.20 0.18 0.12 1/80 11206": running / all threads of the machine
            others = int(file.read().split()[3].split("/")[0]) - 1
    except OSError:  # not Linux, where torch has no libgomp
        others = 0
    return 100_000 if others < (os.cpu_count() or 1) / 4 else 10_000


if "OMP_WAIT_POLICY" not in os.environ:  # before torch is loaded, which reads it
    os.environ.setdefault("GOMP_SPINCOUNT", str(_spin_count()))

# Public names and their modules, imported when used: `import lathe` is the first thing that every command does.
_MODULES = {
    "compose": "lathe.launch.api",
    "train": "lathe.launch.api",
    "compress": "lathe.verbs.plain_module",
    "export_module": "lathe.verbs.plain_module",
    "load": "lathe.verbs.load",
    "restore": "lathe.verbs.load",
    "runs_frame": "lathe.verbs.report",
    "Trainer": "lathe.trainer",
}
__all__ = ["Trainer", "compose", "compress", "export_module", "load", "restore", "runs_frame", "train"]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'lathe' has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
