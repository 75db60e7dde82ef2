"""Progress of a sweep: a live table on a terminal, else a line for each finished job."""

import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

from lathe.launch.sweep.sweep_dir import ENDED, Job

ROWS = 24  # of a table; jobs beyond them are only counted


class ProgressTable:
    """Shows a sweep's jobs: `slots` at a time, `total` in all, with their objectives `names` and `directions`."""

    def __init__(
        self, folder: Path, slots: int, total: int, done: int, names: list[str], directions: list[str]
    ) -> None:
        self.folder, self.slots, self.total, self.done = folder, slots, total, done
        self.names, self.directions = names, directions
        self.console = Console(stderr=False, highlight=False)
        self.live: Live | None = None
        self.shown = 0.0

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
        self.done += not again
        if job.state == "failed":
            self.say(f"Error: job {job.number} ({job.label}): {job.sentence}", error=True)
        elif self.live is None:
            numbers = [f"{name} {value}" for name, value in zip(self.names, _numbers(job), strict=False)]
            place = f", {job.run_dir}" if job.run_dir else ""
            how = f"{' '.join([job.state, *numbers])} in {_time(job.seconds)}{place}"
            how = f"{job.state}, {job.sentence}" if job.sentence else how
            self.say(f"{self.done} of {self.total}, job {job.number}, {job.label}: {how}")

    def update(self, jobs: Sequence[Job], began: dict[int, float], force: bool = False) -> None:
        """Update the table, at most four times a second."""
        if self.live is None or (time.monotonic() - self.shown < 0.25 and not force):
            return
        self.shown = time.monotonic()
        self.live.update(Group(str(self.folder), self._table(jobs, began), self._left(jobs, began)), refresh=True)

    def _table(self, jobs: Sequence[Job], began: dict[int, float]) -> Table:
        running = [job for job in jobs if job.number in began]
        rest = [job for job in jobs if job.number not in began and job.state != "waiting"]
        best = best_job(jobs, self.directions)
        table = Table("job", "values", "state", ", ".join(self.names) or "objective", "time")
        for job in sorted([*running, *rest[-(ROWS - len(running)) :]], key=lambda job: job.number):
            seconds = job.seconds + (time.monotonic() - began[job.number] if job.number in began else 0)
            number = ", ".join(_numbers(job)) + (" *" if job is best else "")
            table.add_row(str(job.number), job.label, job.state, number, _time(seconds))
        return table

    def _left(self, jobs: Sequence[Job], began: dict[int, float]) -> str:
        counted = [f"{sum(job.state == state for job in jobs)} {state}" for state in ENDED]
        line = f"{len(began)} running, {', '.join(counted)} of {self.total}"
        times = [job.seconds for job in jobs if job.state == "complete"]
        left = self.total - sum(job.state in ENDED for job in jobs)
        return f"{line}; about {_time(statistics.mean(times) * left / self.slots)} left" if times and left else line


def _numbers(job: Job) -> list[str]:
    return [f"{value:.4g}" for value in job.reached]


def _time(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, seconds = divmod(int(seconds), 60)
    return f"{minutes // 60} h {minutes % 60:02} min" if minutes >= 60 else f"{minutes} min {seconds:02} s"


def best_job(jobs: Sequence[Job], directions: Sequence[str]) -> Job | None:
    """Return the best of several complete jobs with one objective."""
    done = [job for job in jobs if job.state == "complete" and len(job.reached) == 1]
    if len(directions) != 1 or len(done) < 2:
        return None
    return (max if directions[0] == "max" else min)(done, key=lambda job: job.reached[0])
