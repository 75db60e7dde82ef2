"""Read runs for the commands that list, report, compare and reproduce them.

Files are read when they are needed, so that a thousand runs are listed quickly. Nothing is built from them, and an
unreadable one is reported by the run's `sentence`. Imports no torch.
"""

import csv
import glob
import hashlib
import os
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

from lathe.config.metric_names import objective_name
from lathe.config.override_parsing import key_of, value_of
from lathe.config.resolve import flatten
from lathe.errors import UserError, require
from lathe.files import open_plain, require_writable
from lathe.runs.run_discovery import (
    RunEntry,
    RunStatus,
    is_busy,
    is_locked,
    is_sweep,
    jobs_by_run,
    read_status,
    runs_below,
    status_without_run,
)
from lathe.runs.rundir import RunDir, display_path, drop_overrides, rerun_overrides, run_command, suggest_folder

UNITS = ("B", "kB", "MB", "GB", "TB")
COLUMNS = ("name", "date", "state", "seed", "tags", "objective", "steps", "size")  # besides metrics and keys
SEEDS = ("seed", "data.fold")
# numbers of result.json that don't measure the model
COUNTS = ("seed", "steps", "epochs", "best_step", "devices", "pruned")
WITHOUT_RUNS = ("latest", "benchmark", "slurm")  # folders below log_dir
LARGEST = 1e150  # squares of larger numbers may overflow


def is_number(value: Any) -> bool:
    """Return whether a value is a number; true and false are not."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def finite(value: Any) -> float | None:
    """Return a finite number of at most LARGEST; None for anything else."""
    return value if is_number(value) and abs(value) <= LARGEST else None


class Run:
    """A run directory, or a sweep's job without one.

    `path` is None for a job whose run directory was never made or is gone; its file is `file`. `job` is the record of
    the sweep, empty for other runs. `known` caches what configurations share (RunDir.plain).
    """

    def __init__(self, entry: RunEntry, known: dict[str, Any] | None = None) -> None:
        self.entry, self.job, self.file, self._known = entry, entry.job, entry.file, known
        self.path = entry.path.resolve() if entry.path is not None and entry.path.is_dir() else None
        self.where = display_path(self.path or self.file or Path())  # as commands name it
        self.directory = RunDir(self.path or Path(os.devnull), self.where)

    @property
    def name(self) -> str:
        """The value of `name`, which several runs share."""
        return self.path.parent.name if self.path is not None else str(self.job.get("name", ""))

    @property
    def label(self) -> str:
        """Its directory in reports: <name>/<time>; for a job without one its file."""
        return printable(self.where if self.path is None else f"{self.path.parent.name}/{self.path.name}")

    @property
    def number(self) -> int | None:
        return self.job["number"] if isinstance(self.job.get("number"), int) else None

    @cached_property
    def started(self) -> datetime:
        """The start in UTC; for a job without a run, the time of its file."""
        if self.path is not None:
            return self.directory.started
        with suppress(OSError):
            return datetime.fromtimestamp((self.file or Path()).stat().st_mtime, UTC)
        return datetime.fromtimestamp(0, UTC)

    @property
    def date(self) -> str:
        return f"{self.started.astimezone():%Y-%m-%d %H:%M:%S}"

    @cached_property
    def status(self) -> RunStatus:
        """Its status, and the contents of its files."""
        if self.path is not None:
            return read_status(self.directory, self.job, self._known)
        if self.entry.path is None and self.job.get("state") == "waiting":
            return RunStatus("waiting")
        return status_without_run(self.entry.path, self.job)

    @property
    def state(self) -> str:
        """One of `run_discovery.STATES`, or waiting for a job that has not begun."""
        return self.status.state

    @cached_property
    def sentence(self) -> str | None:
        """Why it is not complete, or the command that continues it."""
        if self.state == "unfinished" and self.directory.last.exists():
            # without `trusted`, which the error of that command names
            return printable(f"{run_command('train.py', 'resume', self.where)} continues it.")
        return None if self.status.sentence is None else printable(self.status.sentence)

    @property
    def busy(self) -> bool:
        """True if a live process has the run, or is about to."""
        assert self.path is not None
        return is_locked(self.path) or (not self.directory.complete and is_busy(self.path))

    @property
    def config(self) -> Mapping[str, Any]:
        """The configuration; empty if it can't be read."""
        return self.status.config or {}

    @cached_property
    def leaves(self) -> dict[str, Any]:
        """The configuration by dotted key."""
        return {printable(key): value for key, value in flatten(dict(self.config)).items()} if self.config else {}

    @property
    def result(self) -> Mapping[str, Any]:
        """The contents of result.json; empty without one that can be read."""
        return self.status.result or {}

    @cached_property
    def overrides(self) -> list[str]:
        """The overrides that it was started with, those of its job if its own can't be read."""
        typed = self.status.overrides or self.job.get("overrides")
        return [str(word) for word in typed] if isinstance(typed, list) else []

    @cached_property
    def metrics(self) -> dict[str, float]:
        """The finite numbers of result.json, by name."""
        numbers = {printable(name): finite(value) for name, value in self.result.items() if name not in COUNTS}
        return {name: value for name, value in numbers.items() if value is not None}

    @cached_property
    def environment(self) -> dict[str, Any]:
        """The contents of environment.json; empty if it can't be read."""
        with suppress(UserError, OSError):
            return self.directory.environment
        return {}

    @cached_property
    def receipt(self) -> dict[str, Any]:
        """The contents of receipt.json; empty without one that can be read."""
        with suppress(UserError, OSError):
            return self.directory.receipt
        return {}

    @cached_property
    def tags(self) -> list[str]:
        tags = self.result.get("tags", []) if self.result else self.config.get("tags")
        return [str(tag) for tag in tags] if isinstance(tags, list) else []

    @property
    def seed(self) -> Any:
        return self.setting("seed")

    @property
    def fold(self) -> Any:
        return self.setting("data.fold")

    @cached_property
    def objective(self) -> tuple[str, float | None]:
        return objective_name(self.result, self.overrides), finite(
            self.result.get("objective", self.job.get("objective"))
        )

    @cached_property
    def steps(self) -> int | None:
        """The number of optimizer steps that are recorded."""
        if isinstance(self.result.get("steps"), int):
            return int(self.result["steps"])
        path = self.directory.path / "metrics.csv"
        with suppress(OSError, ValueError, LookupError, csv.Error), open_plain(path, "rb") as file:
            head = file.readline()
            file.seek(max(len(head), file.seek(0, os.SEEK_END) - 65536))  # not the whole of a long file
            last = file.read().rstrip(b"\0\r\n").decode(errors="replace").splitlines()[-1]
            names, values = csv.reader([head.decode("utf-8-sig"), last])
            return int(values[names.index("step")])
        return None

    @cached_property
    def size(self) -> int:
        return _bytes_in(str(self.path)) if self.path is not None else 0

    def setting(self, key: str) -> Any:
        """Return a key of the configuration, of the overrides if it has none; None without either."""
        typed = [value_of(word) for word in self.overrides if key_of(word) == key]
        value = self.leaves.get(key, typed[-1] if typed else None)
        return printable(value) if isinstance(value, str) else value

    def value(self, key: str) -> Any:
        """Return the column, metric or configuration value at `key`; None if there is none."""
        if key in COLUMNS:
            return self.objective[1] if key == "objective" else getattr(self, key)
        return self.result[key] if key in self.result else self.setting(key)

    def keys(self) -> set[str]:
        return {*COLUMNS, *self.result, *self.leaves, *map(key_of, self.overrides)}

    def curves(self, choose: Callable[[Sequence[str]], Sequence[str]]) -> dict[str, "Curve"]:
        """Return the metrics that `choose` takes of the names in its metrics.csv."""
        return {} if self.path is None else read_curves(self.path / "metrics.csv", choose)

    def command(self, seeds: Sequence[Any] = (), folds: Sequence[Any] = ()) -> str:
        """Return the shell command that repeats this run, or several `seeds` and `folds` of it."""
        swept = {key: values for key, values in zip(SEEDS, (seeds, folds), strict=True) if len(values) > 1}
        overrides = drop_overrides(rerun_overrides(self.overrides, self.leaves), *swept)
        overrides += [f"{key}={','.join(map(str, values))}" for key, values in swept.items()]
        typed = self.environment.get("command")
        compress = isinstance(typed, list) and typed and os.path.basename(str(typed[0])) == "compress.py"
        script = "scripts/compress.py" if compress else "train.py"
        return printable(shlex.join(["python", script, *(["-m"] if swept else []), *overrides]))


def find_runs(named: str | Sequence[str] | None, log_dir: Path | None = None) -> list[Run]:
    """Return each run and job below paths or patterns (None: `log_dir`) once, ordered by path; jobs come last."""
    if named is None:
        assert log_dir is not None
        entries = list(runs_below(log_dir, WITHOUT_RUNS))
    else:
        patterns = [named] if isinstance(named, str) else named
        entries = []
        for pattern in patterns:
            for folder in paths_of(pattern):
                below = list(runs_below(folder))
                hint = "name logs/<name> or a run directory, which has a config.yaml and an environment.json."
                require(bool(below) or is_sweep(folder), f"runs={pattern}: it has no run directory; {hint}")
                entries += below
    by_path: dict[Path, RunEntry] = {}
    for entry in entries:
        first = by_path.setdefault((entry.path or entry.file or Path()).resolve(), entry)
        if not first.job:
            first.job, first.file = entry.job, entry.file
    log_dirs = {path.parent.parent for path, entry in by_path.items() if entry.path is not None}
    for folder in log_dirs | ({log_dir} if log_dir else set()):
        for path, job in jobs_by_run(folder).items():  # which say how a run without a result ended
            if path in by_path and not by_path[path].job:
                by_path[path].job, by_path[path].file = job.job, job.file
    shared: dict[str, Any] = {}
    runs = [Run(entry, shared) for entry in by_path.values()]
    if named is None:  # the job of a run that was archived is not listed
        runs = [run for run in runs if run.path is None or (log_dir and run.path.is_relative_to(log_dir))]
    return sorted(runs, key=lambda run: (run.path is None, str(run.path or ""), run.number or 0))


def paths_of(pattern: str) -> list[Path]:
    """Return the files and folders that a path or a pattern names; raise UserError if there is none."""
    try:
        paths = [Path(pattern)] if os.path.exists(pattern) else [Path(path) for path in sorted(glob.glob(pattern))]
    except (OSError, ValueError):  # too long, or with a null byte
        paths = []
    short = pattern[:200]
    hint = suggest_folder(Path(short.split("*")[0]), "name a run directory, logs/<name> or a sweep's directory.")
    require(bool(paths), f"runs={short}: there is no such folder; {hint}")
    return paths


Curve = tuple[list[int], list[float]]  # steps and values


def read_curves(path: Path, choose: Callable[[Sequence[str]], Sequence[str]]) -> dict[str, Curve]:
    """Return the columns of a metrics.csv that `choose` takes: its numbers, up to a line that can't be read."""
    curves: dict[str, Curve] = {}
    with suppress(OSError, UnicodeDecodeError, csv.Error), open_plain(path, newline="", encoding="utf-8-sig") as file:
        rows = csv.DictReader(file)
        names = choose(rows.fieldnames or [])
        for row in islice(rows, 10_000_000):
            for name in filter(row.get, names):
                with suppress(KeyError, TypeError, ValueError, OverflowError):
                    step, value = int(float(row["step"])), float(row[name])
                    steps, values = curves.setdefault(name, ([], []))
                    steps.append(step)
                    values.append(value)
    return curves


def spread(length: int, most: int) -> list[int]:
    """Return the indices of at most `most` of `length` points, evenly spaced, with both ends."""
    if length <= most:
        return list(range(length))
    return sorted({round(i * (length - 1) / max(1, most - 1)) for i in range(most)})


def _bytes_in(folder: str) -> int:
    total = 0
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with suppress(OSError):
                is_folder = entry.is_dir(follow_symlinks=False)
                total += _bytes_in(entry.path) if is_folder else entry.stat(follow_symlinks=False).st_size
    return total


def differing_environments(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Return the differing entries of two environment.json by name; a diff is given by length and SHA-256."""
    return differences(dict(_facts(a)), dict(_facts(b)))


def differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return both values of each key at which they differ; "absent" for a key that one lacks."""
    pairs = {key: (a.get(key, "absent"), b.get(key, "absent")) for key in {**a, **b}}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def _facts(environment: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield from ((key, str(environment.get(key))) for key in ("python", "platform", "cpu", "cores"))
    for name in ("packages", "threads"):
        group = environment.get(name)
        yield from ((str(key), str(value)) for key, value in (group.items() if isinstance(group, dict) else ()))
    yield "commit", str(environment.get("git_commit"))
    diff = str(environment.get("git_diff") or "")
    digest = hashlib.sha256(diff.encode(errors="surrogateescape")).hexdigest()[:12]
    yield "uncommitted diff", f"{len(diff.splitlines())} lines, {digest}" if diff else "none"


def check_output(output: str | None, suffixes: Sequence[str] = ()) -> None:
    """Raise an error for an `output` that can't be written, or has none of `suffixes`; nothing is created."""
    if output is not None:
        path = Path(output)
        require(not suffixes or path.suffix in suffixes, f"output={output}: name a file of {' or '.join(suffixes)}.")
        require(path.resolve().parent.is_dir(), f"output={output}: its folder does not exist.")
        require(not path.is_dir(), f"output={output} is a folder: name a file.")
        require_writable(path.resolve().parent)


# text


def printable(text: str) -> str:
    """Replace unprintable characters, which could control a terminal or end a line."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def many(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"


def size_text(count: float) -> str:
    """Format bytes with decimal units."""
    unit, *larger = UNITS
    while count >= 1000 and larger:
        count, unit = count / 1000, larger.pop(0)
    return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.1f} {unit}"


def age_text(seconds: float) -> str:
    """Format a time in the largest unit that it holds twice."""
    units = (("days", 86400), ("hours", 3600), ("minutes", 60), ("seconds", 1))
    unit, length = next((pair for pair in units if seconds >= 2 * pair[1]), units[-1])
    return f"{seconds / length:.0f} {unit}"


def table_lines(head: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[bool] | None = None) -> list[str]:
    """Return lines of columns that are as wide as their longest cell; those in `right` are aligned to the right."""
    cells = [[printable(cell) for cell in row] for row in (head, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    ends = right or [False] * len(widths)
    return [
        "  ".join(
            cell.rjust(width) if end else cell.ljust(width) for cell, width, end in zip(row, widths, ends, strict=True)
        ).rstrip()
        for row in cells
    ]
