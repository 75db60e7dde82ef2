"""Helpers that several benchmarks share: their command line, real commands, and the machine in a line."""

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from suites.results import Spread

ROOT = Path(__file__).resolve().parents[1]
QUIET = ("trainer.accelerator=cpu", "trainer.enable_progress_bar=false", "trainer.enable_model_summary=false")


def parser(doc: str | None, rounds: int | None = None) -> argparse.ArgumentParser:
    """Return a parser that prints the module's docstring as help, with an option --rounds unless `rounds` is None."""
    arguments = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if rounds is not None:
        arguments.add_argument("--rounds", type=int, default=rounds, help=f"turns of each side (default {rounds})")
    return arguments


def run(script: str, *words: str, cwd: Path | str = ROOT, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command of this clone with one thread per process; end with its output if it fails."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    line = [sys.executable, str(ROOT / script), *words]
    done = subprocess.run(line, cwd=cwd, env=environment, capture_output=True, text=True)  # noqa: S603 - our commands
    if done.returncode:
        raise SystemExit(f"{script} {' '.join(words)}: {done.stdout[-2000:]}\n{done.stderr[-3000:]}")
    return done


def cpu_seconds(*of: int) -> float:
    """Return user plus system seconds; `of` are resource's RUSAGE constants, by default of the ended children."""
    used = [resource.getrusage(who) for who in of or (resource.RUSAGE_CHILDREN,)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def divide(values: Sequence[float], bases: Sequence[float]) -> Spread:
    """Return the ratios of two sides, round by round."""
    return Spread([value / base for value, base in zip(values, bases, strict=True)])


def verdict(met: bool) -> str:
    """Return the word for a bar."""
    return "met" if met else "missed"


def describe_machine(*packages: str) -> str:
    """Return the processor, cores and versions in a line."""
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in packages)
    return f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, {versions}"


def write_json(path: Path | None, figures: Any) -> None:
    """Write the figures, if --json names a file."""
    if path is not None:
        path.write_text(json.dumps(figures, indent=2) + "\n")
