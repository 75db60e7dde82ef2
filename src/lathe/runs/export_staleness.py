"""Detects exports of earlier weights: a run that is resumed keeps its exports. Imports no Lightning."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lathe.errors import require
from lathe.files import sha256
from lathe.runs.rundir import RunDir

KEY = "checkpoint_sha256"  # in a manifest


def checkpoint_hash(path: Path) -> str:
    """Return the SHA-256 of a checkpoint file, or of the hashes of the files in a sharded one."""
    if not path.is_dir():
        return sha256(path)
    files = sorted(file for file in path.rglob("*") if file.is_file())
    return hashlib.sha256("".join(f"{file.relative_to(path)} {sha256(file)}\n" for file in files).encode()).hexdigest()


def is_outdated(run: RunDir, manifest: Mapping[str, Any]) -> bool:
    """Return whether the run's checkpoint has changed since it was exported; False if either is missing."""
    name, exported = manifest["checkpoint"], manifest.get(KEY)
    if exported is None or name not in ("best", "last"):
        return False
    path = run.path / "checkpoints" / f"{name}.ckpt"
    return path.exists() and checkpoint_hash(path) != exported


def check_current(run: RunDir, target: str, manifest: Mapping[str, Any]) -> None:
    """Raise UserError for an outdated export."""
    name = manifest["checkpoint"]
    checkpoint = "" if name == "best" else f" checkpoint={name}"
    require(
        not is_outdated(run, manifest),
        f"target={target}: exports/{target} is of an earlier {name}.ckpt: export the run again with python "
        f"scripts/export.py run={run.path} target={target}{checkpoint}, or take target=module, the run's own net.",
    )
