"""Find the runs of a report: run directories, folders of them, and sweeps with their jobs."""

import glob
import json
import os
from collections.abc import Collection
from pathlib import Path

from lathe.errors import UserError, require
from lathe.runs.run_discovery import RunEntry, is_run, jobs_by_run, runs_below
from lathe.runs.rundir import suggest_folder

FOREIGN = ("lightning_logs", "mlruns", "wandb", ".hydra", "hparams.yaml", "trainer_state.json", "args.yaml")


def find_places(named: list[str]) -> list[RunEntry]:
    """Return every run below the paths or patterns `named` once, sorted by name."""
    found: dict[Path, RunEntry] = {}
    for text in named:
        places = [place for folder in _folders(text) for place in runs_below(folder)]
        if not places:
            raise UserError(_nothing(text))
        for place in places:
            key = (place.path or place.file or Path()).resolve()
            first = found.setdefault(key, place)
            first.job, first.file = {**first.job, **place.job}, first.file or place.file
    _add_jobs(found.values())
    return sorted(found.values(), key=lambda place: (str(place.path.resolve()) if place.path else "~", _number(place)))


def _add_jobs(places: Collection[RunEntry]) -> None:
    """Add the sweep's records of jobs, which show how a run without a result ended."""
    log_dirs = {place.path.resolve().parent.parent for place in places if place.path is not None}
    told = {run: job for log_dir in log_dirs for run, job in jobs_by_run(log_dir).items()}
    for place in places:
        if place.path is not None and not place.job and place.path.resolve() in told:
            job = told[place.path.resolve()]
            place.job, place.file = job.job, job.file


def common_folder(named: list[str]) -> Path:
    """Return the folder that contains all of `named` and is not a run directory."""
    folders = [folder.resolve() for text in named for folder in _folders(text)]
    return Path(os.path.commonpath([path.parent if is_run(path) else path for path in folders]))


def _folders(text: str) -> list[Path]:
    try:
        paths = [Path(text)] if os.path.exists(text) else [Path(path) for path in sorted(glob.glob(text))]
    except (OSError, ValueError):
        paths = []
    if not paths:
        near = suggest_folder(
            Path(text[:500]), "name a run directory, logs/<name> or a sweep's directory below logs/sweeps."
        )
        raise UserError(f"runs={text[:200]}: there is no such directory; {near}")
    folders = [path for path in paths if path.is_dir()]
    require(bool(folders), f"runs={text[:200]} is a file: name a run directory, or a folder of run directories.")
    return folders


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:  # not readable
        return []


def _number(place: RunEntry) -> int:
    number = place.job.get("number")
    return number if isinstance(number, int) else 0


def _nothing(text: str) -> str:
    folder = next(iter(_folders(text)))
    within = [path for depth in ("*", "*/*") for path in glob.glob(f"{glob.escape(str(folder))}/{depth}")]
    strange = sorted({os.path.basename(path) for path in within} & set(FOREIGN))
    if not _entries(folder):
        return f"runs={text} is an empty folder: name one with run directories below it, such as logs/<name>."
    other = f"; {json.dumps(strange[0])} in it is of another tool" if strange else ""
    return (
        f"runs={text}: no run directory lies below it (each has a config.yaml and an environment.json){other}; "
        "name logs/<name>, or a sweep's directory below logs/sweeps."
    )
