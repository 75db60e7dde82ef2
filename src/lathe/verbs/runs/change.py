"""Tag, move and remove runs, each under its lock, which excludes training processes."""

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from lathe import files
from lathe.errors import UserError, refuse, require
from lathe.runs.run_discovery import read_jobs, subfolders
from lathe.runs.rundir import RunDir, point_latest
from lathe.verbs.runs import table
from lathe.verbs.runs.listed import Listed
from lathe.verbs.runs.table import many, printable, size

NAMED = 10  # runs that are listed before they are removed


def tag(runs: Sequence[Listed], log_dir: Path, words: Sequence[str], without: Sequence[str]) -> None:
    """Add and remove tags, in config.yaml (for a resumed run) and in result.json (for reports).

    Raises UserError, before anything is changed, if a run is running or unreadable.
    """
    refuse([*_in_the_way(runs, log_dir), *(run.standing.unread for run in runs if run.standing.unread is not None)])
    both = sorted({*words} & {*without})
    require(not both, f"tag and untag both name {', '.join(both)}: leave it in one of them.")
    changed = 0
    for run in runs:
        assert run.path is not None
        with held(run):
            changed += _tagged(run.run, run.where, words, without)
    others = "." if changed == len(runs) else ", which was so already." if len(runs) == 1 else ", the others were so."
    print(f"{changed} of {many(len(runs), 'run')} changed{others}")


def _tagged(run: RunDir, where: str, words: Sequence[str], without: Sequence[str]) -> bool:
    config = run.plain("config.yaml")
    require(isinstance(config, dict), f"{where}: its config.yaml can't be read as a configuration.")
    result = run.result if run.complete else None
    found = (config.get("tags") or []) + ((result or {}).get("tags") or [])
    tags = [word for word in dict.fromkeys((*found, *words)) if word not in without]
    changed = tags != (config.get("tags") or []) or (result is not None and tags != (result.get("tags") or []))
    if changed:
        run.save_config({**config, "tags": tags}, signed=run.signed)
        if result is not None:
            run.finish({**{key: value for key, value in result.items() if key != "tags"}, **_named(tags)})
    return changed


def _named(tags: list[str]) -> dict[str, list[str]]:
    return {"tags": tags} if tags else {}


def archive(runs: Sequence[Listed], log_dir: Path, folder: str) -> None:
    """Move runs to `<folder>/<name>/<run>`; raise UserError, and move none, if one can't be moved."""
    goal = Path(folder).resolve()
    places = [(run, goal / run.name / run.run.path.name) for run in runs]
    inside = [run for run in runs if run.path is not None and goal.is_relative_to(run.path)]
    require(not inside, f"archive={folder} lies in a run directory: name a folder outside of them.")
    require(goal != log_dir, f"archive={folder} is where the runs are: name another folder.")
    refuse(
        [
            *_in_the_way(runs, log_dir),
            *_needed(runs, log_dir),
            *(f"archive={folder}: {place} is there already." for _, place in places if os.path.lexists(place)),
        ]
    )
    for run, place in places:
        assert run.path is not None
        with held(run):
            place.parent.mkdir(parents=True, exist_ok=True)
            files.move(run.path, place)
        with suppress(OSError):
            run.path.parent.rmdir()
        _note_in_sweep(log_dir, run.path, place)
        print(f"{run.where} -> {place}")
    _mend_latest(log_dir)
    print(f"{many(len(runs), 'run')} moved; python scripts/runs.py runs={folder} lists them.")


def delete(runs: Sequence[Listed], log_dir: Path, state: str, sure: bool) -> None:
    """Remove the runs in this state, after confirmation; keep unreadable ones, whose state is not certain."""
    gone = [run for run in runs if run.state == state and run.path is not None and run.standing.unread is None]
    lost = table.unread([run for run in runs if run.state == state])
    if lost is not None:
        print(f"{lost} What can't be read is not removed: look at it, and remove it by hand.")
    jobs = [run for run in runs if run.state == state and run.path is None]
    if jobs:
        print(_without_directory(jobs, state))
    if not gone:
        print(f"{'No other' if jobs else 'None'} of {many(len(runs), 'run')} is {state}: nothing was removed.")
        return
    refuse([*_in_the_way(gone, log_dir), *_needed(gone, log_dir)])
    for run in gone[:NAMED]:
        typed = printable(" ".join(run.typed))
        print(f"{run.where}  {size(run.size)}  last written {_ago(run.age)} ago  {typed}".rstrip())
    if len(gone) > NAMED:
        print(f"and {len(gone) - NAMED} more")
    what = f"{many(len(gone), f'{state} run')}, {size(sum(run.size for run in gone))}"
    if not sure:
        require(
            sys.stdin.isatty(), f"delete={state} asks before it removes {what}, and this is no terminal: add yes=true."
        )
        require(_agreed(f"Remove {what}? [y/N] "), "nothing was removed.")
    count = 0
    for run in gone:
        count += _deleted(run, state)
    _mend_latest(log_dir)
    print(f"{count} of {many(len(gone), 'run')} removed.")
    require(count == len(gone), f"delete={state}: {many(len(gone) - count, 'run')} stayed, as is said above.")


def _without_directory(jobs: Sequence[Listed], state: str) -> str:
    """Return the message about jobs without a run directory."""
    if len(jobs) == 1:
        has, why = "has", f"it is {state} stands in {jobs[0].where}"
    else:
        has, why = "have", f"they are {state} stands in their files (the first of them {jobs[0].where})"
    nothing = "no run directory, so there is nothing to remove"
    return f"{many(len(jobs), f'{state} job')} of a sweep {has} {nothing}: why {why}."


def _agreed(question: str) -> bool:
    try:
        return input(question).strip().lower() in ("y", "yes")
    except EOFError:
        return False


def _deleted(run: Listed, state: str) -> bool:
    """Remove a run, unless its state has changed since it was listed."""
    assert run.path is not None
    again = Listed(run.path, run.job)
    try:
        with held(run):
            if again.run.complete != (state in ("complete", "pruned")):
                print(f"{run.where} is {again.state} by now: it stays.")
                return False
            files.remove(run.path)
    except UserError as error:
        print(f"{error} It stays.")
        return False
    with suppress(OSError):
        run.path.parent.rmdir()
    return True


@contextmanager
def held(run: Listed) -> Iterator[None]:
    """Lock a run; raise UserError if another process or user has it."""
    with ExitStack() as stack:
        try:
            stack.enter_context(run.run.locked())
        except OSError as error:
            raise UserError(f"{run.where} can't be held: {error.strerror}; it may belong to somebody else.") from error
        yield


def _in_the_way(runs: Sequence[Listed], log_dir: Path) -> Iterator[str]:
    """Yield an error for each run that may not be changed."""
    for run in runs:
        if run.path is None:
            yield f"{run.where} is a job without a run directory: add where=[state!={run.state}]."
        elif not run.path.is_relative_to(log_dir) or run.path.is_symlink():
            yield (
                f"{run.where} is not below paths.log_dir={log_dir}, and nothing else is changed: say where it lies, "
                f"paths.log_dir={run.path.parent.parent}."
            )
        elif run.state == "running" or run.busy:
            yield f"{run.where} is running: leave it out (where=[state!=running]), or wait for its end."


def _needed(runs: Sequence[Listed], log_dir: Path) -> Iterator[str]:
    """Yield an error for each run that an incomplete run needs, for example as a teacher."""
    from lathe.verbs.runs.find import find

    names = {run.run.path.name: run for run in runs}
    for other in find(None, log_dir):
        if other.path is None or other.run.complete or other.path.name in names:
            continue
        with suppress(OSError):
            text = (other.path / "config.yaml").read_text(errors="replace")
            for name, run in names.items():
                if name in text:
                    yield f"{run.where} is needed by {other.where}, which names it and is not complete: leave it there."


def _note_in_sweep(log_dir: Path, old: Path, new: Path) -> None:
    """Update the run's path in the records of sweeps."""
    for sweep in subfolders(log_dir / "sweeps"):
        for path, job in read_jobs(sweep):
            if isinstance(job.get("run_dir"), str) and os.path.realpath(job["run_dir"]) == str(old):
                files.write_atomically(path, json.dumps({**job, "run_dir": str(new)}, indent=2) + "\n")


def _mend_latest(log_dir: Path) -> None:
    """Point a dangling logs/latest to the newest run, or remove it."""
    from lathe.verbs.runs.find import find

    latest = log_dir / "latest"
    if not latest.is_symlink() or latest.exists():
        return
    left = sorted((run for run in find(None, log_dir) if run.path is not None), key=lambda run: run.started)
    if left:
        point_latest(log_dir, left[-1].run.path)
        print(f"{latest.name} leads to {left[-1].where} now.")
    else:
        latest.unlink()


def _ago(seconds: float) -> str:
    for unit, length in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} seconds"
