"""Progress of a sweep: a live table on a terminal, else a line for each finished job."""

import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

from lathe.config.metric_names import best_of, objective_name, without_split
from lathe.errors import UserError
from lathe.launch.sweep.sweep_dir import ENDED, Job
from lathe.runs.rundir import RunDir

ROWS = 24  # of a table; jobs beyond them are only counted


class ProgressTable:
    """Shows a sweep's jobs: `slots` at a time, `total` in all. `names` are a search's objectives."""

    def __init__(
        self,
        folder: Path,
        slots: int,
        total: int,
        done: int = 0,
        names: Sequence[str] = (),
        directions: Sequence[str] = (),
    ) -> None:
        self.folder, self.slots, self.total = folder, slots, total
        self.names, self.directions = names, directions
        self.console = Console(stderr=False, highlight=False)
        self.live: Live | None = None
        self.shown, self.done = 0.0, done

    def __enter__(self) -> "ProgressTable":
        if self.console.is_terminal:
            self.live = Live(console=self.console, auto_refresh=False)
            self.live.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if self.live is not None:
            self.live.__exit__(None, None, None)
            self.live = None

    def say(self, line: str, error: bool = False) -> None:
        """Print a line above the table."""
        if self.live is not None:
            self.live.console.print(line, markup=False)
        else:
            print(line, file=sys.stderr if error else sys.stdout, flush=True)

    def ended(self, job: Job, again: bool = False) -> None:
        """Report a job that ended, or that is tried `again`."""
        self.names = self.names or metric_of([job])
        if job.state == "failed":
            self.done += not again
            self.say(f"Error: job {job.number} ({job.label}): {job.sentence}", error=True)
        elif self.live is None:
            self.done += 1
            self.say(f"{self.done} of {self.total}, job {job.number}, {job.label}: {outcome(job, self.names)}")

    def update(self, jobs: Sequence[Job], began: dict[int, float], force: bool = False) -> None:
        """Update the table, at most four times a second."""
        if self.live is None or (time.monotonic() - self.shown < 0.25 and not force):
            return
        self.shown = time.monotonic()
        self.live.update(Group(str(self.folder), self._table(jobs, began), self._left(jobs, began)), refresh=True)

    def _table(self, jobs: Sequence[Job], began: dict[int, float]) -> Table:
        running = [job for job in jobs if job.number in began]
        rest = [job for job in jobs if job.number not in began and job.state != "waiting"]
        self.names = self.names or metric_of(jobs)
        best = best_job(jobs, self.names, self.directions)
        table = Table("job", "values", "state", ", ".join(self.names) or "objective", "time")
        for job in sorted([*running, *rest[-(ROWS - len(running)) :]], key=lambda job: job.number):
            seconds = job.seconds + (time.monotonic() - began[job.number] if job.number in began else 0)
            number = ", ".join(_reached(job)) + (" *" if job is best else "")
            table.add_row(str(job.number), job.label, job.state, number, _time(seconds))
        return table

    def _left(self, jobs: Sequence[Job], began: dict[int, float]) -> str:
        counted = [f"{sum(job.state == state for job in jobs)} {state}" for state in ENDED]
        line = f"{len(began)} running, {', '.join(counted)} of {self.total}"
        times = [job.seconds for job in jobs if job.state == "complete"]
        left = self.total - sum(job.state in ENDED for job in jobs)
        return f"{line}; about {_time(statistics.mean(times) * left / self.slots)} left" if times and left else line


def outcome(job: Job, names: Sequence[str] = ()) -> str:
    """Return a finished job's state, the values of the metrics `names`, its time and its run directory."""
    if job.state == "pruned" and job.run_dir is None:
        return f"pruned, {job.sentence}"
    found = _reached(job)
    known = names if len(names) == len(found) else [""] * len(found)
    value = ", ".join(f"{name} {number}".strip() for name, number in zip(known, found, strict=True))
    place = "" if job.run_dir is None else f", {job.run_dir}"
    return f"{f'{job.state} {value}'.strip()} in {_time(job.seconds)}{place}"


def _reached(job: Job) -> list[str]:
    """Return the job's values for a search, or the run's own objective."""
    values: Sequence[float | None] = job.values or [job.objective]
    return [f"{value:.4g}" for value in values if value is not None]


def _time(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, seconds = divmod(int(seconds), 60)
    return f"{minutes // 60} h {minutes % 60:02} min" if minutes >= 60 else f"{minutes} min {seconds:02} s"


def metric_of(jobs: Sequence[Job]) -> list[str]:
    """Return the name of the first complete job's metric; empty without one."""
    done = next((job for job in jobs if job.state == "complete"), None)
    name = objective_name(_result(done), done.overrides) if done is not None else ""
    return [name] if name else []


def best_job(jobs: Sequence[Job], names: Sequence[str], directions: Sequence[str] = ()) -> Job | None:
    """Return the best of several complete jobs with one objective; their results give missing `directions`."""
    done = [job for job in jobs if job.state == "complete"]
    if len(names) != 1 or not done:
        return None
    result = {"directions": {without_split(names[0]): directions[0]}} if directions else _result(done[0])
    at = best_of([job.values[0] if job.values else job.objective for job in done], names[0], result)
    return None if at is None else done[at]


def _result(job: Job) -> Mapping[str, Any]:
    """Return the result.json of a job's run; empty if it can't be read."""
    with suppress(UserError, OSError):
        return RunDir(job.run_dir).result if job.run_dir is not None else {}
    return {}
