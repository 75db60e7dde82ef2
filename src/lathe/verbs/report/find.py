"""Where the runs of a report lie: run directories, folders of them, and sweeps with their jobs."""

import glob
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lathe.errors import UserError, did_you_mean, require
from lathe.runs.jobs import jobs

DEPTH = 5  # folders below the one that was named: logs/<name>/<run> is two
FOREIGN = ("lightning_logs", "mlruns", "wandb", ".hydra", "hparams.yaml", "trainer_state.json", "args.yaml")


@dataclass
class Place:
    """A run directory, the job of a sweep, or both: a job that failed early has no directory."""

    path: Path | None
    job: dict[str, Any] = field(default_factory=dict)


def find_places(named: list[str]) -> list[Place]:
    """Every run below the paths or patterns that `runs` names, each once, in the order of their names.

    Raises:
        UserError: a path leads nowhere, or there is no run below it.
    """
    found: dict[Path | int, Place] = {}
    for text in named:
        places = [place for folder in _folders(text) for place in _below(folder, DEPTH)]
        if not places:
            raise UserError(_nothing(text))
        for place in places:
            key = len(found) if place.path is None else place.path.resolve()
            found.setdefault(key, place).job.update(place.job)
    return sorted(found.values(), key=lambda place: (str(place.path.resolve()) if place.path else "~", _number(place)))


def common_folder(named: list[str]) -> Path:
    """The folder that holds all that `runs` names and is no run directory itself."""
    folders = [folder.resolve() for text in named for folder in _folders(text)]
    return Path(os.path.commonpath([path.parent if is_run(path) else path for path in folders]))


def is_run(path: Path) -> bool:
    """Whether a run directory lies at `path`."""
    return (path / "config.yaml").is_file() and (path / "environment.json").is_file()


def is_sweep(path: Path) -> bool:
    """Whether a sweep's directory lies at `path`."""
    return (path / "sweep.yaml").is_file() and (path / "jobs").is_dir()


def _folders(text: str) -> list[Path]:
    try:
        paths = [Path(text)] if os.path.exists(text) else [Path(path) for path in sorted(glob.glob(text))]
    except (OSError, ValueError):
        paths = []
    if not paths:
        near = _near(Path(text[:500]))
        raise UserError(f"runs={text[:200]}: there is no such directory; {near}")
    folders = [path for path in paths if path.is_dir()]
    require(bool(folders), f"runs={text[:200]} is a file: name a run directory, or a folder of run directories.")
    return folders


def _near(path: Path) -> str:
    """What the nearest folder above a path that is not there has instead."""
    above = next((folder for folder in path.parents if folder.is_dir()), Path())
    names = [entry.name for entry in _entries(above) if entry.is_dir() and entry.name[0] != "."]
    return did_you_mean(path.name, names, "name a run directory, logs/<name> or a sweep's directory below logs/sweeps.")


def _below(folder: Path, depth: int) -> Iterator[Place]:
    if is_run(folder):
        yield Place(folder)
    elif is_sweep(folder):
        yield from _jobs(folder)
    elif depth:
        for path in _entries(folder):
            if path.is_dir() and not path.is_symlink() and path.name[0] != ".":
                yield from _below(path, depth - 1)


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:  # not ours to read
        return []


def _jobs(sweep: Path) -> Iterator[Place]:
    """The jobs of a sweep, by their files in jobs/."""
    told = dict(jobs(sweep))
    for path in sorted((sweep / "jobs").glob("*.json")):
        job = told.get(path, {"state": "failed", "sentence": f"{path} can't be read as JSON."})
        yield Place(_run_of(job, sweep), {"number": int(path.stem) if path.stem.isdigit() else 0, **job})


def _run_of(job: dict[str, Any], sweep: Path) -> Path | None:
    """A job's run directory: where it was made, or where it lies beside the sweep if all of logs/ has moved."""
    if not isinstance(job.get("run_dir"), str):
        return None
    made = Path(job["run_dir"])
    return next((path for path in (made, sweep.parent.parent / Path(*made.parts[-2:])) if is_run(path)), made)


def _number(place: Place) -> int:
    number = place.job.get("number")
    return number if isinstance(number, int) else 0


def _nothing(text: str) -> str:
    folder = next(iter(_folders(text)))
    strange = sorted({path.name for path in [*folder.glob("*"), *folder.glob("*/*")] if path.name in FOREIGN})
    if not _entries(folder):
        return f"runs={text} is an empty folder: name one with run directories below it, such as logs/<name>."
    other = f"; {json.dumps(strange[0])} in it is of another tool" if strange else ""
    return (
        f"runs={text}: no run directory lies below it (each has a config.yaml and an environment.json){other}; "
        "name logs/<name>, or a sweep's directory below logs/sweeps."
    )
