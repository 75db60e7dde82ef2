"""Read and write receipts, with the comparison of runtimes that a benchmark adds under `inference`."""

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from lathe.errors import UserError
from lathe.files import require_plain, write_atomically
from lathe.receipt import page
from lathe.runs.checkpoints import read_checkpoint
from lathe.runs.export_staleness import checkpoint_hash
from lathe.runs.rerun_command import run_command
from lathe.runs.rundir import RunDir

SECTION = "inference"
FIGURE = re.compile(r"[A-Za-z0-9_-]+\.svg")


def fingerprint(run: RunDir) -> dict[str, Any]:
    """Return the optimizer step and the SHA-256 of the run's best checkpoint, a file or a folder."""
    return {"step": int(read_checkpoint(run.best)["global_step"]), "sha256": checkpoint_hash(run.best)}


def still_true(run: RunDir) -> dict[str, Any] | None:
    """Return the comparison in the run's receipt if it measured the current weights; else None."""
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError, UserError):
        section = run.receipt[SECTION]
        if section["checkpoint"] == fingerprint(run):
            return dict(section)
    return None


def check_places(run: RunDir) -> None:
    """Raise OSError if a file of the receipt can't be written, before measuring."""
    for name in ("receipt.svg", "receipt.md", "receipt.json"):
        require_plain(run.path / name)


def put(run: RunDir, receipt: Mapping[str, Any], section: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Write receipt.svg, receipt.md and last receipt.json; `section` replaces the comparison."""
    found = {key: value for key, value in receipt.items() if key != SECTION}
    if section is not None:
        found[SECTION] = dict(section)
    if not FIGURE.fullmatch(found["figure"]):  # from an untrusted receipt: it could overwrite another file
        raise ValueError(f"a figure named {found['figure']!a}")
    texts = {
        found["figure"]: page.figure(found),
        "receipt.md": page.markdown(found),
        "receipt.json": json.dumps(found, indent=2) + "\n",
    }
    for name, text in texts.items():
        write_atomically(run.path / name, text)
    return found


def feed(run: RunDir, section: Mapping[str, Any]) -> bool:
    """Replace the comparison in the run's receipt; return False if the run has no receipt."""
    path = run.path / "receipt.json"
    if not path.is_file():
        return False
    try:
        put(run, run.receipt, section)
    except (UserError, ValueError, KeyError, TypeError, AttributeError) as error:
        command = run_command("scripts/receipt.py", "run", run.path, run.known_config)
        raise UserError(
            f"{path} can't be read as a receipt of this version of Lathe: {command} measures anew."
        ) from error
    return True
