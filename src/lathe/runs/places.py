"""Where runs lie: run directories, folders of them, and sweeps with their jobs. Imports no torch."""

import os
import re
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lathe.errors import UserError, did_you_mean
from lathe.trust import read_json

STAMP = re.compile(r"(\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d)_[0-9a-f]{6}")
LEFT = ("config.yaml", "environment.json", "result.json", "metrics.csv", "checkpoints")  # by a run that has begun
DEPTH = 5  # folders below one that was named: logs/<name>/<run> is two


@dataclass
class Place:
    """A run directory, the job of a sweep, or both: a job that failed early has no directory, and where one was there
    may be nothing any more. `file` is the job's."""

    path: Path | None
    job: dict[str, Any] = field(default_factory=dict)
    file: Path | None = None


def shown(path: Path) -> str:
    """A path as lists of runs have it: from the working directory if it is below that."""
    with suppress(ValueError):
        return str(path.resolve().relative_to(Path.cwd()))
    return str(path)


def nearest(path: Path, otherwise: str) -> str:
    """A clause that proposes what the nearest folder above a path that is not there has instead."""
    above = next((folder for folder in path.parents if folder.is_dir()), Path())
    names: list[str] = []
    with suppress(OSError):  # not ours to read
        names = [entry.name for entry in above.iterdir() if entry.is_dir() and entry.name[0] != "."]
    return did_you_mean(path.parts[len(above.parts)] if path.parts else "", names, otherwise)


def is_run(path: Path) -> bool:
    """Whether a run directory lies at `path`. One that has lost its config.yaml or environment.json is known by its
    name and by what else a run leaves."""
    if (path / "config.yaml").is_file() and (path / "environment.json").is_file():
        return True
    named = STAMP.fullmatch(path.name) is not None and not is_sweep(path)
    return named and any(os.path.lexists(path / name) for name in LEFT)


def is_sweep(path: Path) -> bool:
    """Whether a sweep's directory lies at `path`."""
    return (path / "sweep.yaml").is_file()


def below(folder: Path, passed: Collection[str] = (), depth: int = DEPTH) -> Iterator[Place]:
    """The runs at and below a folder, in the order of their names, and the jobs of sweeps there. Links below it are not
    followed; folders right below it whose names are `passed` are passed over."""
    if is_run(folder):
        yield Place(folder)
    elif is_sweep(folder):
        yield from jobs_of(folder)
    elif depth:
        for path in folders_in(folder):
            if path.name not in passed:
                yield from below(path, (), depth - 1)


def folders_in(folder: Path) -> list[Path]:
    """Folders in a folder that are neither links nor hidden, in order; none where it can't be read."""
    try:
        with os.scandir(folder) as entries:
            names = sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
    except OSError:
        return []
    return [folder / name for name in names if name[0] != "."]


def jobs(sweep: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """The files of a sweep's jobs, in order, and what each says; those that can't be read are passed over."""
    for path in sorted((sweep / "jobs").glob("[0-9]*.json")):
        with suppress(UserError, OSError):
            yield path, read_json(path, str(path))


def jobs_of(sweep: Path) -> Iterator[Place]:
    """The jobs of a sweep, each with its run directory if it has one; of a file that can't be read, one that failed."""
    told = dict(jobs(sweep))
    for path in sorted((sweep / "jobs").glob("[0-9]*.json")):
        job = told.get(path, {"state": "failed", "sentence": f"{path} can't be read as JSON."})
        yield Place(_run_of(job, sweep), {"number": int(path.stem) if path.stem.isdigit() else 0, **job}, path)


def _run_of(job: dict[str, Any], sweep: Path) -> Path | None:
    """A job's run directory: where it was made, or where it lies beside the sweep if all of logs/ has moved. A job that
    names what is no run directory has none."""
    if not isinstance(job.get("run_dir"), str) or "\0" in job["run_dir"]:
        return None
    made = Path(job["run_dir"])
    there = (path for path in (made, sweep.parent.parent / Path(*made.parts[-2:])) if is_run(path))
    return next(there, None if os.path.lexists(made) else made)


def jobs_by_run(log_dir: Path) -> dict[Path, Place]:
    """The jobs of all sweeps below `log_dir` that have run directories, by these."""
    found = (place for sweep in folders_in(log_dir / "sweeps") for place in jobs_of(sweep))
    return {place.path.resolve(): place for place in found if place.path is not None}
