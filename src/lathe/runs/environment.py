"""Versions, hardware and state of the code at the start of a run, for environment.json. Imports no torch."""

import hashlib
import os
import platform
import shutil
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from lathe.trust.user_packages import source_folder

# They decide in which order numbers are added.
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
PACKAGES = ("lathe", "torch", "lightning", "hydra-core", "omegaconf", "numpy", "torchmetrics")


def describe_environment(launch_id: str | None = None) -> dict[str, Any]:
    """Return the time in UTC, versions, hardware, command, git commit, uncommitted diff, and digests of the user's
    files.
    """
    versions = {package: _version(package) for package in PACKAGES}
    return {
        "started": datetime.now(UTC).isoformat(timespec="microseconds"),
        "command": sys.argv,
        "launch_id": launch_id,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "threads": {name: os.environ[name] for name in THREADS if name in os.environ},
        "gpus": _gpu_names(),
        "packages": {package: version for package, version in versions.items() if version is not None},
        "git_commit": _git("rev-parse", "HEAD"),
        "git_diff": _git("diff", "HEAD"),
        "own_files": digest_own_files(),
    }


def digest_own_files() -> dict[str, str]:
    """Return the SHA-256 of each Python file below `src/` that is not Lathe's, by its path from there."""
    folder = source_folder()
    files = [] if folder is None else sorted(folder.rglob("*.py"))
    names = {str(file.relative_to(folder)): file for file in files if folder is not None}
    return {
        name: hashlib.sha256(file.read_bytes()).hexdigest()
        for name, file in names.items()
        if Path(name).parts[0] not in ("lathe", "hydra_plugins") and file.is_file()
    }


def _version(package: str) -> str | None:
    from importlib import metadata  # not needed for --help

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor()
    )


def _gpu_names() -> list[str]:
    """Return the names of the NVIDIA GPUs; none if nvidia-smi is missing or fails."""
    import subprocess  # not needed for --help

    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    try:
        done = subprocess.run(  # noqa: S603
            [program, "--query-gpu=name", "--format=csv,noheader"], capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.splitlines() if done.returncode == 0 else []


def _git(*arguments: str) -> str | None:
    import subprocess  # not needed for --help

    try:
        done = subprocess.run(  # noqa: S603
            ["git", *arguments],  # noqa: S607
            capture_output=True,
            encoding="utf-8",
            errors="surrogateescape",  # a diff is in the encoding of its files
            timeout=10,
            cwd=Path(__file__).parent,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    # the last lines of a diff may be blank
    return done.stdout.removesuffix("\n") if done.returncode == 0 else None
