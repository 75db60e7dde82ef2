"""Whether a run's exports are still of its weights: a run that is trained on keeps them. Imports no Lightning."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lathe.errors import require
from lathe.export.manifest import sha256
from lathe.runs.rundir import RunDir

KEY = "checkpoint_sha256"  # in a manifest
CHECKPOINTS = ("best", "last")


def checkpoint_sum(path: Path) -> str:
    """The SHA-256 of a checkpoint; of a folder, that of its files' hashes."""
    if not path.is_dir():
        return sha256(path)
    files = sorted(file for file in path.rglob("*") if file.is_file())
    return hashlib.sha256("".join(f"{file.relative_to(path)} {sha256(file)}\n" for file in files).encode()).hexdigest()


def outdated(run: RunDir, manifest: Mapping[str, Any]) -> bool:
    """Whether an export in the run's exports is of an earlier checkpoint than the run has under that name now. Where
    nobody can tell it is not: its manifest holds no hash, or the checkpoint is not there any more.
    """
    name, known = manifest["checkpoint"], manifest.get(KEY)
    if known is None or name not in CHECKPOINTS:
        return False
    path = run.path / "checkpoints" / f"{name}.ckpt"
    return path.exists() and checkpoint_sum(path) != known


def check_current(run: RunDir, target: str, manifest: Mapping[str, Any]) -> None:
    """Raises UserError for an export that is outdated: whoever asks for the run means the weights that it has now."""
    name = manifest["checkpoint"]
    which = "" if name == "best" else f" checkpoint={name}"
    require(
        not outdated(run, manifest),
        f"target={target}: exports/{target} is of an earlier {name}.ckpt: export the run again with python "
        f"scripts/export.py run={run.path} target={target}{which}, or take target=module, the run's own net.",
    )
