"""Status of a run, from its files and the file of its sweep job. Builds nothing and imports no torch."""

import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lathe.errors import UserError, require
from lathe.runs.rundir import GROUPS, RunDir

STATES = ("complete", "pruned", "running", "unfinished", "failed", "gone")
FRESH = 60.0  # seconds for which a directory without a lock counts as a run that is starting


@dataclass(frozen=True)
class RunStatus:
    """`state` is one of `STATES`; `sentence` is the reason, if there is one.

    A file that can't be read is None. `unread` then says why, and the run counts as failed.
    """

    state: str
    sentence: str | None = None
    unread: str | None = None
    config: Mapping[str, Any] | None = None
    overrides: list[str] | None = None
    result: Mapping[str, Any] | None = None


def read_status(run: RunDir, job: Mapping[str, Any], known: dict[str, Any] | None = None) -> RunStatus:
    """Return the status of a run directory; `job` is empty unless it belongs to a sweep.

    `known` holds what configurations share, as for `RunDir.plain`.
    """
    errors: list[str] = []
    config = _read(run, "config.yaml", lambda: _config(run, known), errors)
    overrides = _read(run, "overrides.yaml", lambda: run.overrides, errors) if _exists(run, "overrides.yaml") else None
    result = _read(run, "result.json", lambda: run.result, errors) if _exists(run, "result.json") else None
    state = "failed" if errors else _state(run, job, result)
    unread = errors[0] if errors else None
    return RunStatus(state, unread or _sentence(job), unread, config, overrides, result)


def status_without_run(path: Path | None, job: Mapping[str, Any]) -> RunStatus:
    """Return the status of a job without a run directory: it never made one, or nothing is at its `path` any more.

    A pruned job without a path is one that a search has skipped.
    """
    state, sentence = job.get("state"), _sentence(job)
    if path is not None and state not in ("failed", "refused"):
        ended = f", which was {state}," if state in ("complete", "pruned") else ""
        return RunStatus("gone", f"the run{ended} was moved or removed: nothing is at {path}.")
    if path is None and isinstance(job.get("run_dir"), str):
        sentence = sentence or f"it names {job['run_dir']!r}, which is not a run directory."
    is_skipped = state == "pruned" and job.get("run_dir") is None
    return RunStatus("pruned" if is_skipped else "running" if state == "running" else "failed", sentence)


def is_busy(path: Path) -> bool:
    """Return whether a run without a result has a live process, or may get one soon. Leaves no file."""
    return is_locked(path) if (path / ".lock").exists() else seconds_since_write(path) < FRESH


def is_locked(path: Path) -> bool:
    """Return whether a process holds the lock of a run directory."""
    try:
        return (path / ".lock").exists() and RunDir(path).busy
    except OSError:  # another user's, which can't be locked
        return False


def seconds_since_write(path: Path) -> float:
    """Return the seconds since a run directory was last written to."""
    newest = 0.0
    for place in (path, path / "metrics.csv", path / "run.log", path / "checkpoints"):
        with suppress(OSError):
            newest = max(newest, place.stat().st_mtime)
    return time.time() - newest


def _state(run: RunDir, job: Mapping[str, Any], result: Mapping[str, Any] | None) -> str:
    if result is not None:
        return "complete" if result.get("pruned") is None else "pruned"
    if job.get("state") == "pruned":
        return "pruned"
    if is_locked(run.path):
        return "running"
    if job.get("state") in ("failed", "refused"):
        return "failed"
    return "running" if is_busy(run.path) else "unfinished"


def _sentence(job: Mapping[str, Any]) -> str | None:
    sentence = job.get("sentence")
    return None if sentence is None else " ".join(str(sentence).split())


def _exists(run: RunDir, name: str) -> bool:
    return os.path.lexists(run.path / name)


def _read(run: RunDir, name: str, read: Callable[[], Any], errors: list[str]) -> Any:
    """Return what `read` gives, or None, with the reason appended to `errors`."""
    try:
        return read()
    except FileNotFoundError:
        errors.append(f"{run.where}: its {name} is not there.")
    except OSError as error:
        errors.append(f"{run.where}: its {name} can't be read: {error.strerror}.")
    except UserError as error:
        errors.append(str(error))
    return None


def _config(run: RunDir, known: dict[str, Any] | None) -> dict[str, Any]:
    config = run.plain("config.yaml", known)
    require(isinstance(config, dict), f"{run.where}: its config.yaml can't be read as a configuration.")
    missing = [name for name in ("name", *GROUPS) if name not in config]
    require(not missing, f"{run.where}: its config.yaml has no {', '.join(missing)}, which every run has.")
    return dict(config)
