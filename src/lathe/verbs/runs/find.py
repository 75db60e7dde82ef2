"""Which runs a command is about: all below a folder, a sweep's, or those that it names."""

import glob
import os
from collections.abc import Iterator
from pathlib import Path

from lathe.errors import UserError, require
from lathe.runs.jobs import jobs as jobs_in
from lathe.verbs.runs.listed import Listed

NOT_NAMES = ("latest", "benchmark", "slurm", "sweeps")  # folders below log_dir that hold no runs


def find(runs: str | list[str] | None, log_dir: Path) -> list[Listed]:
    """The runs that `runs` names, each once; null: all below `log_dir`. Links are followed where the user has named
    them, and nowhere below.

    Raises:
        UserError: something named is not there, or holds no run.
    """
    jobs = _jobs(log_dir / "sweeps")
    if runs is None:
        return [*_below(log_dir, jobs), *(job for job in jobs.values() if job.path is None)]
    found: dict[str, Listed] = {}
    for word in [runs] if isinstance(runs, str) else runs:
        for place in _places(word):
            some = list(_at(place, jobs))
            require(
                bool(some) or place != Path(word).resolve() or _is_sweep(place),
                f"runs={word}: there is no run directory in it; logs/<name>/ holds the runs of a name.",
            )
            found.update({str(run.path or run.where): run for run in some})
    return list(found.values())


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


def _at(place: Path, jobs: dict[str, Listed]) -> Iterator[Listed]:
    if _is_run(place):
        yield jobs.get(str(place)) or Listed(place)
    elif _is_sweep(place):
        own = _jobs_of(place)
        yield from (job for job in own.values() if job.path is None or job.path.is_dir())
    else:
        yield from _below(place, jobs)
        for entry in _folders(place):
            if _is_run(Path(entry)):
                yield jobs.get(entry) or Listed(Path(entry))


def _below(folder: Path, jobs: dict[str, Listed]) -> Iterator[Listed]:
    """The runs in the folders of a folder."""
    for name in _folders(folder):
        if os.path.basename(name) not in NOT_NAMES and not _is_run(Path(name)):
            for path in _folders(name):
                if os.path.isfile(os.path.join(path, "config.yaml")):
                    yield jobs.get(path) or Listed(Path(path))


def _folders(folder: str | Path) -> list[str]:
    """Folders in a folder that are neither links nor hidden, in order."""
    try:
        with os.scandir(folder) as entries:
            return sorted(
                entry.path for entry in entries if entry.is_dir(follow_symlinks=False) and entry.name[0] != "."
            )
    except OSError:
        return []


def _is_run(path: Path) -> bool:
    return (path / "config.yaml").is_file() and (path / "environment.json").is_file()


def _is_sweep(path: Path) -> bool:
    return (path / "sweep.yaml").is_file()


def _jobs(sweeps: Path) -> dict[str, Listed]:
    """Jobs of all sweeps, by run directory."""
    return {key: job for sweep in _folders(sweeps) for key, job in _jobs_of(Path(sweep)).items()}


def _jobs_of(sweep: Path) -> dict[str, Listed]:
    """A sweep's jobs by run directory; those that failed before they had one by their file."""
    found: dict[str, Listed] = {}
    for path, job in jobs_in(sweep):
        run_dir = job.get("run_dir")
        if isinstance(run_dir, str):
            place = Path(run_dir) if os.path.isabs(run_dir) else sweep.parent.parent.parent / run_dir
            found[os.path.realpath(place)] = Listed(Path(os.path.realpath(place)), job)
        elif job.get("state") == "failed":
            found[str(path)] = Listed(None, job, path)
    return found
