"""Writes the result files of a suite."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lathe.files import write_atomically
from lathe.runs.environment import describe_environment


def write_files(
    output: Path,
    texts: Sequence[str],
    drawing: str,
    cases: Sequence[dict[str, Any]],
    request: dict[str, Any],
    seconds: float,
    *,
    threads: str,
    turns: str,
) -> str:
    """Write results.json, results.md and plot.svg into `output`; return the tables with hardware and versions."""
    environment = {key: value for key, value in describe_environment().items() if key != "git_diff"}
    packages = ", ".join(f"{name} {version}" for name, version in environment["packages"].items())
    under = (
        f"{environment['cpu']}, {environment['cores']} cores, {request['threads']} {threads}; Python "
        f"{environment['python']}, {packages}. Medians (lowest to highest) of n = {request['rounds']} rounds in turns"
        f"{turns}; ratios are taken round by round. {seconds:.0f} s.\n"
    )
    text = "\n".join([*texts, under])
    output.mkdir(parents=True, exist_ok=True)
    write_atomically(output / "results.md", text)
    write_atomically(output / "plot.svg", drawing)
    written = {"request": request, "environment": environment, "cases": list(cases)}
    write_atomically(output / "results.json", json.dumps(written, indent=2) + "\n")
    return text
