"""Finds runs below a folder: by place, name, configuration or launch; reads their status, compares two. No torch."""

import csv
import itertools
import json
import os
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lathe.config.resolve import changes
from lathe.errors import UserError, require
from lathe.files import open_plain
from lathe.runs.rundir import NOT_THE_EXPERIMENT, RunDir, require_groups
from lathe.trust import read_json

STAMP = re.compile(r"(\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d)_[0-9a-f]{6}")  # the name of a run directory
RUN_FILES = ("config.yaml", "environment.json", "result.json", "metrics.csv", "checkpoints")
STATES = ("complete", "pruned", "running", "unfinished", "failed", "gone")
FRESH = 60.0  # seconds for which a directory without a lock counts as a run that is starting
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


def find_same(log_dir: Path, cfg: dict[str, Any], complete: bool = False) -> RunDir | None:
    """Return the newest run of exactly this configuration: an unfinished one, or a `complete` one.

    Raises UserError if a live process holds the unfinished one: another run of the same would be a duplicate.
    """
    for run in find_runs(log_dir, str(cfg["name"])):
        if run.complete != complete or not run.readable:
            continue
        if not changes(run.known_config, cfg, str(run.path), NOT_THE_EXPERIMENT):
            is_busy = not complete and run.busy
            require(not is_busy, f"resume=auto: another process is at {run.path}: wait for it, or leave resume out.")
            return run
    return None


def find_unlike(log_dir: Path, cfg: dict[str, Any]) -> tuple[RunDir, list[str]] | None:
    """Return the unfinished run that differs from this configuration in the fewest keys, and these keys."""
    unlike = []
    for run in find_runs(log_dir, str(cfg["name"])):
        if not run.complete and run.readable and not run.busy:
            lines = changes(run.known_config, cfg, str(run.path), NOT_THE_EXPERIMENT)
            unlike.append((run, [line.split(":")[0] for line in lines]))
    return min(unlike, key=lambda pair: len(pair[1]), default=None)


def find_launch(log_dir: Path, name: str, launch_id: str, unfinished: bool = True) -> RunDir | None:
    """Return the newest run, or the newest `unfinished` run, that was started under `launch_id`."""
    for run in find_runs(log_dir, name):
        if not (unfinished and run.complete) and run.readable and run.environment.get("launch_id") == launch_id:
            return run
    return None


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
    """Yield the jobs of a sweep, each with its run directory if it has one; an unreadable one has failed.

    If all of logs/ has moved, a directory is at the same place in it.
    """
    readable = dict(read_jobs(sweep))
    for file in sorted((sweep / "jobs").glob("[0-9]*.json")):
        job = readable.get(file, {"state": "failed", "sentence": f"{file} can't be read as JSON."})
        path = None
        if isinstance(job.get("run_dir"), str) and "\0" not in job["run_dir"]:
            saved = Path(job["run_dir"])
            moved = sweep.parent.parent / Path(*saved.parts[-2:])
            path = next(filter(is_run, (saved, moved)), None if os.path.lexists(saved) else saved)
        yield RunEntry(path, {"number": int(file.stem) if file.stem.isdigit() else 0, **job}, file)


def jobs_by_run(log_dir: Path) -> dict[Path, RunEntry]:
    """Return the jobs of all sweeps below `log_dir` that have run directories, keyed by these."""
    entries = (entry for sweep in subfolders(log_dir / "sweeps") for entry in jobs_of(sweep))
    return {entry.path.resolve(): entry for entry in entries if entry.path is not None}


# Status


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

    def read(name: str, content: Callable[[], Any]) -> Any:
        try:
            return content()
        except FileNotFoundError:
            errors.append(f"{run.where}: its {name} is not there.")
        except OSError as error:
            errors.append(f"{run.where}: its {name} can't be read: {error.strerror}.")
        except UserError as error:
            errors.append(str(error))
        return None

    def configuration() -> dict[str, Any]:
        config = run.plain("config.yaml", known)
        require(isinstance(config, dict), f"{run.where}: its config.yaml can't be read as a configuration.")
        require_groups(config, run.where)
        return dict(config)

    exists = {name: os.path.lexists(run.path / name) for name in ("overrides.yaml", "result.json")}
    config = read("config.yaml", configuration)
    overrides = read("overrides.yaml", lambda: run.overrides) if exists["overrides.yaml"] else None
    result = read("result.json", lambda: run.result) if exists["result.json"] else None
    if errors:
        return RunStatus("failed", errors[0], errors[0], config, overrides, result)
    return RunStatus(_state(run, job, result), _sentence(job), None, config, overrides, result)


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
    for written in (path, path / "metrics.csv", path / "run.log", path / "checkpoints"):
        with suppress(OSError):
            newest = max(newest, written.stat().st_mtime)
    return time.time() - newest


def _state(run: RunDir, job: Mapping[str, Any], result: Mapping[str, Any] | None) -> str:
    if result is not None:
        return "complete" if result.get("pruned") is None else "pruned"
    if job.get("state") == "pruned":
        return "pruned"
    has_failed = job.get("state") in ("failed", "refused")
    if is_locked(run.path) or (not has_failed and is_busy(run.path)):
        return "running"
    return "failed" if has_failed else "unfinished"


def _sentence(job: Mapping[str, Any]) -> str | None:
    return None if job.get("sentence") is None else " ".join(str(job["sentence"]).split())


# Comparison of two complete runs, such as an interrupted and an uninterrupted one

# Measured times and memory, which differ between any two runs: in result.json, and in the columns of metrics.csv.
RESULT_TIMES = re.compile(
    r"seconds|.*_per_s|step_ms|data_wait|grad_sync|mfu|epoch_s|rank_ms_.*|slowest_rank|energy_.*|peak_.*"
)
LINE_TIMES = ("throughput/", "device/", "DeviceStatsMonitor.")


def metric_rows(directory: Path) -> list[dict[str, str]]:
    """Read metrics.csv without empty columns and times."""
    with open_plain(directory / "metrics.csv", newline="", encoding="utf-8-sig") as file:
        lines = list(csv.DictReader(file))
    return [{key: "" if key.startswith(LINE_TIMES) else value for key, value in row.items() if value} for row in lines]


def compare_runs(directory: Path, reference: Path) -> list[str]:
    """Return a line for each difference between two run directories: weights, results, metrics and files."""
    import torch  # the rest of this module answers without it

    differences = []
    for name in ("last", "best"):
        files = (path / "checkpoints" / f"{name}.ckpt" for path in (directory, reference))
        mine, theirs = (torch.load(path, map_location="cpu", weights_only=True)["state_dict"] for path in files)
        if mine.keys() != theirs.keys() or not all(torch.equal(mine[key], theirs[key]) for key in mine):
            differences.append(f"weights of {name}.ckpt")
    ours, other = (json.loads((path / "result.json").read_text()) for path in (directory, reference))
    keys = [key for key in sorted(ours | other) if not RESULT_TIMES.fullmatch(key.rpartition("/")[2])]
    changed = [key for key in keys if repr(ours.get(key)) != repr(other.get(key))]
    differences += [f"result.json: {key} {ours.get(key)!r} instead of {other.get(key)!r}" for key in changed]
    pairs = itertools.zip_longest(metric_rows(directory), metric_rows(reference))
    differences += [f"metrics.csv: {mine} instead of {theirs}" for mine, theirs in pairs if mine != theirs][:2]
    receipts, expected = ({path.name for path in folder.glob("receipt.*")} for folder in (directory, reference))
    differences += [f"no {name}" for name in sorted(expected - receipts)]
    hidden = [path.relative_to(directory) for path in directory.rglob(".*") if path.name != ".lock"]
    return differences + [f"left: {path}" for path in hidden]
