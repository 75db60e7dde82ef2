"""Finds runs below a folder: by place, name, configuration or launch. Imports no torch."""

import os
import re
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lathe.config.resolve import changes
from lathe.errors import UserError, require
from lathe.runs.rundir import NOT_THE_EXPERIMENT, RunDir
from lathe.trust import read_json

STAMP = re.compile(r"(\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d)_[0-9a-f]{6}")  # the name of a run directory
RUN_FILES = ("config.yaml", "environment.json", "result.json", "metrics.csv", "checkpoints")
DEPTH = 5  # folders to search below one that was named: logs/<name>/<run> is two


@dataclass
class RunEntry:
    """A run directory at `path`, a job of a sweep with its `file`, or both.

    A job that failed early has no directory, and that of another may be gone.
    """

    path: Path | None
    job: dict[str, Any] = field(default_factory=dict)
    file: Path | None = None


def find_runs(log_dir: Path, name: str) -> list[RunDir]:
    """Return all runs called `name`, newest first."""
    runs = [RunDir(path.parent.absolute()) for path in (log_dir / name).glob("[!.]*/config.yaml")]
    return sorted(runs, key=lambda run: (run.started, run.path.name), reverse=True)


def find_unfinished(log_dir: Path, cfg: dict[str, Any]) -> RunDir | None:
    """Return the newest run of exactly this configuration without a result.

    Raises:
        UserError: a live process holds it, so another run of the same would be a duplicate.
    """
    for run in find_runs(log_dir, str(cfg["name"])):
        if not run.complete and run.readable and not _differences(run, cfg):
            require(not run.busy, f"resume=auto: another process is at {run.path}: wait for it, or leave resume out.")
            return run
    return None


def find_unlike(log_dir: Path, cfg: dict[str, Any]) -> tuple[RunDir, list[str]] | None:
    """Return the unfinished run that differs from this configuration in the fewest keys, and these keys."""
    unlike = []
    for run in find_runs(log_dir, str(cfg["name"])):
        if not run.complete and run.readable and not run.busy:
            unlike.append((run, [line.split(":")[0] for line in _differences(run, cfg)]))
    return min(unlike, key=lambda pair: len(pair[1]), default=None)


def find_complete(log_dir: Path, cfg: dict[str, Any]) -> RunDir | None:
    """Return the newest complete run of exactly this configuration."""
    for run in find_runs(log_dir, str(cfg["name"])):
        if run.complete and run.readable and not changes(run.config, cfg, str(run.path), NOT_THE_EXPERIMENT):
            return run
    return None


def find_launch(log_dir: Path, name: str, launch_id: str, unfinished: bool = True) -> RunDir | None:
    """Return the newest run that was started under `launch_id`, or the newest unfinished one, which a restart
    continues.
    """
    for run in find_runs(log_dir, name):
        if not (unfinished and run.complete) and run.readable and run.environment.get("launch_id") == launch_id:
            return run
    return None


def _differences(run: RunDir, cfg: dict[str, Any]) -> list[str]:
    return changes(run.known_config, cfg, str(run.path), NOT_THE_EXPERIMENT)


def is_run(path: Path) -> bool:
    """Return whether `path` is a run directory.

    One without its config.yaml or environment.json is recognised by its name and its other files.
    """
    if (path / "config.yaml").is_file() and (path / "environment.json").is_file():
        return True
    is_named = STAMP.fullmatch(path.name) is not None and not is_sweep(path)
    return is_named and any(os.path.lexists(path / name) for name in RUN_FILES)


def is_sweep(path: Path) -> bool:
    """Return whether `path` is the directory of a sweep."""
    return (path / "sweep.yaml").is_file()


def runs_below(folder: Path, skipped: Collection[str] = (), depth: int = DEPTH) -> Iterator[RunEntry]:
    """Yield the runs and sweep jobs at and below a folder, in the order of their names.

    Links below it are not followed. Its own subfolders named in `skipped` are left out.
    """
    if is_run(folder):
        yield RunEntry(folder)
    elif is_sweep(folder):
        yield from jobs_of(folder)
    elif depth:
        for path in subfolders(folder):
            if path.name not in skipped:
                yield from runs_below(path, (), depth - 1)


def subfolders(folder: Path) -> list[Path]:
    """Return the folders in a folder that are neither links nor hidden, sorted; none if it can't be read."""
    try:
        with os.scandir(folder) as entries:
            names = sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
    except OSError:
        return []
    return [folder / name for name in names if name[0] != "."]


def read_jobs(sweep: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield the file and the content of each readable job of a sweep, in order."""
    for path in sorted((sweep / "jobs").glob("[0-9]*.json")):
        with suppress(UserError, OSError):
            yield path, read_json(path, str(path))


def jobs_of(sweep: Path) -> Iterator[RunEntry]:
    """Yield the jobs of a sweep, each with its run directory if it has one; an unreadable one has failed."""
    readable = dict(read_jobs(sweep))
    for path in sorted((sweep / "jobs").glob("[0-9]*.json")):
        job = readable.get(path, {"state": "failed", "sentence": f"{path} can't be read as JSON."})
        yield RunEntry(_run_of(job, sweep), {"number": int(path.stem) if path.stem.isdigit() else 0, **job}, path)


def _run_of(job: dict[str, Any], sweep: Path) -> Path | None:
    """Return a job's run directory: its saved path, or the same place in logs/ if all of that has moved.

    None if the job has no valid path.
    """
    if not isinstance(job.get("run_dir"), str) or "\0" in job["run_dir"]:
        return None
    saved = Path(job["run_dir"])
    found = (path for path in (saved, sweep.parent.parent / Path(*saved.parts[-2:])) if is_run(path))
    return next(found, None if os.path.lexists(saved) else saved)


def jobs_by_run(log_dir: Path) -> dict[Path, RunEntry]:
    """Return the jobs of all sweeps below `log_dir` that have run directories, keyed by these."""
    entries = (entry for sweep in subfolders(log_dir / "sweeps") for entry in jobs_of(sweep))
    return {entry.path.resolve(): entry for entry in entries if entry.path is not None}
