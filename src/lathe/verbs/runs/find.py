"""Find the runs of a command: all below a folder, a sweep's, or named ones."""

import glob
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lathe.errors import UserError, require
from lathe.runs.run_discovery import RunEntry, is_sweep, jobs_by_run, runs_below
from lathe.runs.run_status import status_without_run
from lathe.verbs.runs.listed import Listed

NOT_NAMES = ("latest", "benchmark", "slurm")  # folders below log_dir without runs


def find(runs: str | list[str] | None, log_dir: Path) -> list[Listed]:
    """Return the runs that `runs` names; None: all below `log_dir`. Follows only links that are named."""
    jobs = jobs_by_run(log_dir)
    found: dict[str, Listed] = {}
    known: dict[str, Any] = {}
    for place in [log_dir] if runs is None else [path for word in _words(runs) for path in _checked(word)]:
        for one in _listed(runs_below(place, NOT_NAMES if place == log_dir else ()), jobs, known):
            if runs is not None or one.path is None or one.path.is_relative_to(log_dir):  # else archived
                found.setdefault(str(one.path or one.where), one)
    return list(found.values())


def count_gone(runs: str | list[str] | None) -> int:
    """Return the number of jobs in the sweeps of `runs` whose run directory no longer exists."""
    places = [place for word in _words(runs or []) for path in _checked(word) for place in runs_below(path)]
    return len({place.path for place in places if _gone(place)})


def _gone(place: RunEntry) -> bool:
    there = place.path is not None and place.path.is_dir()
    return not there and status_without_run(place.path, place.job).state == "gone"


def _words(runs: str | list[str]) -> list[str]:
    return [runs] if isinstance(runs, str) else runs


def _listed(places: Iterator[RunEntry], jobs: dict[Path, RunEntry], known: dict[str, Any]) -> Iterator[Listed]:
    for place in places:
        if place.path is not None and place.path.is_dir():
            path = place.path.resolve()
            yield Listed(path, place.job or jobs.get(path, place).job, known=known)
        elif place.job.get("state") != "waiting" and not _gone(place):
            yield Listed(None, place.job, place.file)


def _checked(word: str) -> Iterator[Path]:
    """Yield the paths that `word` names; raise UserError for one without runs."""
    for place in _places(word):
        empty = place == Path(word).resolve() and not is_sweep(place) and next(runs_below(place), None) is None
        require(not empty, f"runs={word}: there is no run directory in it; logs/<name>/ holds the runs of a name.")
        yield place


def _places(word: str) -> list[Path]:
    if glob.has_magic(word) and not os.path.exists(word):
        found = sorted(Path(place).resolve() for place in glob.glob(word) if not os.path.islink(place))
        require(bool(found), f"runs={word}: nothing has such a name; in quotes, so that the shell leaves the * alone?")
        return found
    try:
        place = Path(word).resolve()
        require(place.is_dir(), f"runs={word}: there is no such folder; logs/latest is the newest run.")
    except (OSError, RuntimeError, ValueError) as error:
        raise UserError(f"runs={word[:200]!r} leads nowhere; logs/latest is the newest run.") from error
    return [place]
