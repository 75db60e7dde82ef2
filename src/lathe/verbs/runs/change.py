"""Tag, move and remove runs, each under its lock, which excludes training processes."""

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from lathe import files
from lathe.errors import UserError, refuse, require
from lathe.runs.run_discovery import read_jobs, seconds_since_write, subfolders
from lathe.runs.rundir import point_latest
from lathe.verbs.runs.reader import Run, age_text, find_runs, many, printable, size_text

NAMED = 10  # runs that are listed before they are removed


def tag(runs: Sequence[Run], log_dir: Path, words: Sequence[str], without: Sequence[str]) -> None:
    """Add and remove tags, in config.yaml (for a resumed run) and in result.json (for reports).

    Raises UserError, before anything is changed, if a run is running or unreadable.
    """
    refuse([*_not_changeable(runs, log_dir), *(run.status.unread for run in runs if run.status.unread is not None)])
    changed = 0
    for run in runs:
        with run.directory.locked():
            config, directory = run.directory.plain("config.yaml"), run.directory
            result = directory.result if directory.complete else {}
            found = (config.get("tags") or []) + (result.get("tags") or [])
            tags = [word for word in dict.fromkeys((*found, *words)) if word not in without]
            if tags == (config.get("tags") or []) and (not result or tags == (result.get("tags") or [])):
                continue
            changed += 1
            directory.save_config({**config, "tags": tags}, signed=directory.signed)
            if result:
                others = {key: value for key, value in result.items() if key != "tags"}
                directory.finish(others | ({"tags": tags} if tags else {}))
    print(f"{changed} of {many(len(runs), 'run')} changed.")


def archive(runs: Sequence[Run], log_dir: Path, folder: str) -> None:
    """Move runs to `<folder>/<name>/<run>`; raise UserError, and move none, if one can't be moved."""
    goal = Path(folder).resolve()
    places = [(run, goal / run.name / run.path.name) for run in runs if run.path is not None]
    taken = [f"archive={folder}: {place} is there already." for _, place in places if os.path.lexists(place)]
    refuse([*_not_changeable(runs, log_dir), *_needed(runs, log_dir), *taken])
    for run, place in places:
        assert run.path is not None
        with run.directory.locked():
            place.parent.mkdir(parents=True, exist_ok=True)
            files.move(run.path, place)
        with suppress(OSError):
            run.path.parent.rmdir()
        for sweep in subfolders(log_dir / "sweeps"):
            for path, job in read_jobs(sweep):
                if isinstance(job.get("run_dir"), str) and os.path.realpath(job["run_dir"]) == str(run.path):
                    files.write_atomically(path, json.dumps({**job, "run_dir": str(place)}, indent=2) + "\n")
        print(f"{run.where} -> {place}")
    _mend_latest(log_dir)
    print(f"{many(len(runs), 'run')} moved; python scripts/runs.py runs={folder} lists them.")


def delete(runs: Sequence[Run], log_dir: Path, state: str, sure: bool) -> None:
    """Remove the runs in this state, after confirmation; keep unreadable ones, whose state is not certain."""
    runs = [run for run in runs if run.state == state]
    lost = unreadable(runs)
    if lost:
        print(f"{lost} They are not removed: look at them, and remove them by hand.")
    gone = [run for run in runs if run.path is not None and run.status.unread is None]
    if not gone:
        print(f"No run directory is {state}: nothing was removed.")
        return
    refuse([*_not_changeable(gone, log_dir), *_needed(gone, log_dir)])
    for run in gone[:NAMED]:
        assert run.path is not None
        age = age_text(seconds_since_write(run.path))
        print(
            printable(f"{run.where}  {size_text(run.size)}  last written {age} ago  {' '.join(run.overrides)}").rstrip()
        )
    if len(gone) > NAMED:
        print(f"and {len(gone) - NAMED} more")
    if not sure:
        what = f"{many(len(gone), f'{state} run')}, {size_text(sum(run.size for run in gone))}"
        terminal = sys.stdin.isatty()
        require(terminal, f"delete={state} asks before it removes {what}, without a terminal: add yes=true.")
        require(input(f"Remove {what}? [y/N] ").strip().lower() in ("y", "yes"), "nothing was removed.")
    count = sum(_delete(run, state) for run in gone)
    _mend_latest(log_dir)
    print(f"{count} of {many(len(gone), 'run')} removed.")
    require(count == len(gone), f"delete={state}: {many(len(gone) - count, 'run')} stayed, for the reasons above.")


def _delete(run: Run, state: str) -> bool:
    """Remove a run, unless its state has changed since it was listed."""
    assert run.path is not None
    try:
        with run.directory.locked():
            if run.directory.complete != (state in ("complete", "pruned")):
                print(f"{run.where} is {Run(run.entry).state} by now: it stays.")
                return False
            files.remove(run.path)
    except (UserError, OSError) as error:  # another process or user has it
        print(f"{error} It stays.")
        return False
    with suppress(OSError):
        run.path.parent.rmdir()
    return True


def unreadable(runs: Sequence[Run]) -> str | None:
    """Return a message that names runs which can't be read; None if there are none."""
    said = [run.status.unread.rstrip(".") for run in runs if run.status.unread is not None]
    more = f"; and {len(said) - NAMED} more" if len(said) > NAMED else ""
    return printable(f"{many(len(said), 'run')} can't be read: {'; '.join(said[:NAMED])}{more}.") if said else None


def _not_changeable(runs: Sequence[Run], log_dir: Path) -> Iterator[str]:
    """Yield an error for each run that may not be changed."""
    for run in runs:
        if run.path is None:
            yield f"{run.where} is a job without a run directory: add where=[state!={run.state}]."
        elif not run.path.is_relative_to(log_dir):
            yield (
                f"{run.where} is not below paths.log_dir={log_dir}, and nothing else is changed: say where it lies, "
                f"paths.log_dir={run.path.parent.parent}."
            )
        elif run.state == "running" or run.busy:
            yield f"{run.where} is running: leave it out (where=[state!=running]), or wait for its end."


def _needed(runs: Sequence[Run], log_dir: Path) -> Iterator[str]:
    """Yield an error for each run that an incomplete run names, for example as a teacher."""
    names = {run.path.name: run for run in runs if run.path is not None}
    for other in find_runs(None, log_dir):
        if other.path is None or other.directory.complete or other.path.name in names:
            continue
        with suppress(OSError):
            text = (other.path / "config.yaml").read_text(errors="replace")
            for name, run in names.items():
                if name in text:
                    yield f"{run.where} is needed by {other.where}, which names it and is not complete: leave it there."


def _mend_latest(log_dir: Path) -> None:
    """Point a dangling logs/latest to the newest run, or remove it."""
    latest = log_dir / "latest"
    if not latest.is_symlink() or latest.exists():
        return
    left = sorted((run for run in find_runs(None, log_dir) if run.path is not None), key=lambda run: run.started)
    if left:
        point_latest(log_dir, left[-1].directory.path)
        print(f"{latest.name} leads to {left[-1].where} now.")
    else:
        latest.unlink()
