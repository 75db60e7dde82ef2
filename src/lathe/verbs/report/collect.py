"""Collect the runs of a report as plain data, without importing torch."""

import math
import os
import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from lathe.config.override_parsing import key_of
from lathe.config.resolve import flatten
from lathe.errors import UserError
from lathe.runs.rerun_command import drop_overrides, rerun_overrides, run_command
from lathe.runs.run_discovery import RunEntry
from lathe.runs.run_status import read_status, status_without_run
from lathe.runs.rundir import RunDir, display_path
from lathe.verbs.report.find import find_places

# numbers of result.json that are not metrics
COUNTS = ("seed", "steps", "epochs", "best_step", "devices", "pruned")
SEEDS = ("seed", "data.fold")
LARGEST = 1e150  # squares of larger numbers may overflow


def harmless(text: str) -> str:
    """Escape unprintable text of an untrusted file, for a terminal or one line of a file."""
    return text if text.isprintable() else ascii(text)[1:-1]


def finite(value: Any) -> float | None:
    """Return a finite number of at most LARGEST; None for anything else."""
    if not isinstance(value, (int, float)) or isinstance(value, bool) or abs(value) > LARGEST:
        return None
    return value if math.isfinite(value) else None


@dataclass
class Run:
    """A run, or a sweep's job without a run directory.

    A job has `path` None and `file`, its file; its state is `gone` if it ended and the run directory no longer exists.
    `leaves` is the configuration by dotted key, empty if it can't be read; `sentence` the reason why the run is not
    complete; `told` its record as a job of `sweep`.
    """

    path: Path | None
    state: str
    words: list[str] = field(default_factory=list)
    leaves: dict[str, Any] = field(default_factory=dict)
    result: dict[str, Any] = field(default_factory=dict)
    sentence: str | None = None
    job: int | None = None
    sweep: Path | None = None
    told: dict[str, Any] = field(default_factory=dict)
    file: Path | None = None

    @property
    def name(self) -> str:
        """The name in reports; of a job without a run directory its file, as scripts/runs.py lists it."""
        if self.path is not None:
            return harmless(f"{self.path.parent.name}/{self.path.name}")
        return f"job {self.job}" if self.file is None else harmless(display_path(self.file))

    @property
    def seed(self) -> Any:
        return self._told("seed")

    @property
    def fold(self) -> Any:
        return self._told("data.fold")

    def _told(self, key: str) -> Any:
        """Return a key from the configuration, or from the overrides of a job without one."""
        typed = [word.partition("=")[2] for word in self.words if key_of(word) == key]
        value = self.leaves.get(key, typed[-1] if typed else None)
        return harmless(value) if isinstance(value, str) else value

    @cached_property
    def metrics(self) -> dict[str, float]:
        """The finite numbers of result.json, by name."""
        found = {harmless(name): finite(value) for name, value in self.result.items() if name not in COUNTS}
        return {name: value for name, value in found.items() if value is not None}

    @cached_property
    def environment(self) -> dict[str, Any]:
        """The contents of environment.json; empty if it can't be read."""
        try:
            return {} if self.path is None else RunDir(self.path).environment
        except (UserError, OSError):
            return {}

    @cached_property
    def receipt(self) -> dict[str, Any]:
        """The receipt; empty if there is none that can be read."""
        try:
            there = self.path is not None and (self.path / "receipt.json").is_file()
            return RunDir(self.path).receipt if there and self.path is not None else {}
        except (UserError, OSError):
            return {}

    def command(self, seeds: Sequence[Any] = (), folds: Sequence[Any] = ()) -> str:
        """Return the command that repeats this run, or several `seeds` and `folds` of it."""
        words = rerun_overrides(self.words, self.leaves)
        swept = [(key, values) for key, values in zip(SEEDS, (seeds, folds), strict=True) if len(values) > 1]
        words = drop_overrides(words, *(key for key, _ in swept))
        words += [f"{key}={','.join(map(str, values))}" for key, values in swept]
        return harmless(shlex.join(["python", self._script, *(["-m"] if swept else []), *words]))

    @property
    def chosen_by(self) -> str | None:
        """The metric that selects its best checkpoint, or that a sweep optimizes."""
        name = self.leaves.get("objective") or self.result.get("monitor")
        return name if isinstance(name, str) else None

    @property
    def _script(self) -> str:
        typed = self.environment.get("command")
        first = str(typed[0]) if isinstance(typed, list) and typed else ""
        return "scripts/compress.py" if os.path.basename(first) == "compress.py" else "train.py"


def collect(named: list[str]) -> tuple[list[Run], int]:
    """Return the runs below the paths or patterns `named`, and the number of jobs still waiting."""
    found = find_places(named)
    begun = [place for place in found if place.path is not None or place.job.get("state") != "waiting"]
    known: dict[str, Any] = {}
    return [read_run(place, known) for place in begun], len(found) - len(begun)


def read_run(place: RunEntry, known: dict[str, Any] | None = None) -> Run:
    """Read a run; `sentence` reports an unreadable file. `known` caches configurations (RunDir.plain)."""
    job = place.job
    typed = job.get("overrides")
    words = [str(word) for word in typed] if isinstance(typed, list) else []
    where = None if place.file is None else place.file.parent.parent
    if place.path is None or not place.path.is_dir():
        stands = status_without_run(place.path, job)
        sentence = _harmless(stands.sentence)
        run = Run(None, stands.state, words, sentence=sentence, job=_job(job), told=job, sweep=where)
        run.file = place.file
        return run
    directory = RunDir(place.path)
    stands = read_status(directory, job, known)
    sentence, typed = _harmless(stands.sentence), stands.overrides or words
    run = Run(place.path, stands.state, typed, sentence=sentence, job=_job(job), told=job, sweep=where)
    run.result = dict(stands.result or {})
    if stands.config is not None:
        run.leaves = {harmless(key): value for key, value in flatten(stands.config).items()}
    if run.state == "unfinished" and directory.last.exists():
        # without `trusted`, which the error of that command names
        run.sentence = f"{run_command('train.py', 'resume', place.path, {})} goes on with it."
    return run


def _harmless(sentence: str | None) -> str | None:
    return None if sentence is None else harmless(sentence)


def _job(job: dict[str, Any]) -> int | None:
    return job["number"] if isinstance(job.get("number"), int) else None


def check_tasks(runs: Sequence[Run], by: Sequence[str] | None) -> None:
    """Raise UserError if the runs have different tasks, unless `by` compares them."""
    if by is not None and {"task", "task._target_"} & set(by):
        return
    tasks = Counter(str(run.leaves["task._target_"]) for run in runs if "task._target_" in run.leaves)
    if len(tasks) > 1:
        listed = ", ".join(f"{name.rpartition('.')[2]} of {count}" for name, count in tasks.most_common())
        raise UserError(
            f"runs: these are of {len(tasks)} tasks ({harmless(listed)}), whose metrics are no measure of each other: "
            "name runs of one, or compare them all the same with by=task._target_."
        )
