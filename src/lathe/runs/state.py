"""How a run stands, by its own files and by the page of its job: the same for all that list runs. Builds nothing and
imports no torch."""

import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from lathe.errors import UserError, require
from lathe.runs.rundir import GROUPS, RunDir

STATES = ("complete", "pruned", "running", "unfinished", "failed", "gone")
FRESH = 60.0  # seconds in which a directory without a lock is taken for one whose run is beginning


@dataclass(frozen=True)
class Standing:
    """`state` is one of `STATES`, and `sentence` says why, where there is something to say. Of the files, one that
    can't be read is None; `unread` says which and why, and such a run counts as failed."""

    state: str
    sentence: str | None = None
    unread: str | None = None
    config: Mapping[str, Any] | None = None
    overrides: list[str] | None = None
    result: Mapping[str, Any] | None = None


def standing(run: RunDir, job: Mapping[str, Any], known: dict[str, Any] | None = None) -> Standing:
    """What a run directory and the page of its job say, which is empty where it is of no sweep. `known` keeps what
    configurations have in common (RunDir.plain)."""
    said: list[str] = []
    config = _read(run, "config.yaml", partial(_config, run, known), said)
    overrides = _read(run, "overrides.yaml", lambda: run.overrides, said) if _there(run, "overrides.yaml") else None
    result = _read(run, "result.json", lambda: run.result, said) if _there(run, "result.json") else None
    state = "failed" if said else _state(run, job, result)
    unread = said[0] if said else None
    return Standing(state, unread or _sentence(job), unread, config, overrides, result)


def without_run(path: Path | None, job: Mapping[str, Any]) -> Standing:
    """A job without a run directory: it never made one, or nothing is at its `path` any more. `pruned` without a path
    is one that a search has not begun."""
    state, sentence = job.get("state"), _sentence(job)
    if path is not None and state not in ("failed", "refused"):
        ended = f", which was {state}," if state in ("complete", "pruned") else ""
        return Standing("gone", f"the run{ended} was moved or removed: nothing is at {path}.")
    if path is None and isinstance(job.get("run_dir"), str):
        sentence = sentence or f"it names {job['run_dir']!r}, which is no run directory."
    early = state == "pruned" and job.get("run_dir") is None
    return Standing("pruned" if early else "running" if state == "running" else "failed", sentence)


def busy(path: Path) -> bool:
    """Whether a live process is at a run without a result, or is about to be. Leaves no file."""
    return held(path) if (path / ".lock").exists() else age(path) < FRESH


def held(path: Path) -> bool:
    """Whether a process holds the lock of a run directory that has one."""
    try:
        return (path / ".lock").exists() and RunDir(path).busy
    except OSError:  # somebody else's, which can't be locked
        return False


def age(path: Path) -> float:
    """Seconds since something in a run directory was last written."""
    newest = 0.0
    for place in (path, path / "metrics.csv", path / "run.log", path / "checkpoints"):
        with suppress(OSError):
            newest = max(newest, place.stat().st_mtime)
    return time.time() - newest


def _state(run: RunDir, job: Mapping[str, Any], result: Mapping[str, Any] | None) -> str:
    if result is not None:
        return "complete" if result.get("pruned") is None else "pruned"
    if job.get("state") == "pruned" or held(run.path):
        return "pruned" if job.get("state") == "pruned" else "running"
    if job.get("state") in ("failed", "refused"):
        return "failed"
    return "running" if busy(run.path) else "unfinished"


def _sentence(job: Mapping[str, Any]) -> str | None:
    told = job.get("sentence")
    return None if told is None else " ".join(str(told).split())


def _there(run: RunDir, name: str) -> bool:
    return os.path.lexists(run.path / name)


def _read(run: RunDir, name: str, read: Callable[[], Any], said: list[str]) -> Any:
    """What `read` gives, or None, with the reason among what is `said`."""
    try:
        return read()
    except FileNotFoundError:
        said.append(f"{run.where}: its {name} is not there.")
    except OSError as error:
        said.append(f"{run.where}: its {name} can't be read: {error.strerror}.")
    except UserError as error:
        said.append(str(error))
    return None


def _config(run: RunDir, known: dict[str, Any] | None) -> dict[str, Any]:
    config = run.plain("config.yaml", known)
    require(isinstance(config, dict), f"{run.where}: its config.yaml can't be read as a configuration.")
    lacking = [name for name in ("name", *GROUPS) if name not in config]
    require(not lacking, f"{run.where}: its config.yaml has no {', '.join(lacking)}, which every run has.")
    return dict(config)
