"""What a sweep shows while it runs: one table on a terminal that is brought up to date, elsewhere a line for each job
that ended.
"""

import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

from lathe.launch.sweep.place import ENDED, Job

ROWS = 24  # of a table; above it, jobs that wait and those that ended first are counted


class Screen:
    """Shows the jobs of the sweep in `folder`, `slots` of which run at a time; `total` is None where nobody knows;
    `names` are of what a search looks for."""

    def __init__(self, folder: Path, slots: int, total: int | None, done: int = 0, names: Sequence[str] = ()) -> None:
        self.folder, self.slots, self.total, self.names = folder, slots, total, names
        self.console = Console(stderr=False, highlight=False)
        self.live: Live | None = None
        self.shown, self.done = 0.0, done

    def __enter__(self) -> "Screen":
        if self.console.is_terminal:
            self.live = Live(console=self.console, auto_refresh=False)
            self.live.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if self.live is not None:
            self.live.__exit__(None, None, None)
            self.live = None

    def say(self, line: str, error: bool = False) -> None:
        """A line that stays."""
        if self.live is not None:
            self.live.console.print(line, markup=False)
        else:
            print(line, file=sys.stderr if error else sys.stdout, flush=True)

    def ended(self, job: Job, again: bool = False) -> None:
        """A job has come to an end, or is tried `again`."""
        if job.state == "failed":
            self.done += not again
            self.say(f"Error: job {job.number} ({job.label}): {job.sentence}", error=True)
        elif self.live is None:
            self.done += 1
            of = "" if self.total is None else f" of {self.total}"
            self.say(f"{self.done}{of}, job {job.number}, {job.label}: {outcome(job, self.names)}")

    def update(self, jobs: Sequence[Job], began: dict[int, float], force: bool = False) -> None:
        """Brings the table up to date, four times a second."""
        if self.live is None or (time.monotonic() - self.shown < 0.25 and not force):
            return
        self.shown = time.monotonic()
        self.live.update(Group(str(self.folder), self._table(jobs, began), self._left(jobs, began)), refresh=True)

    def _table(self, jobs: Sequence[Job], began: dict[int, float]) -> Table:
        running = [job for job in jobs if job.number in began]
        rest = [job for job in jobs if job.number not in began and job.state != "waiting"]
        rows = sorted([*running, *rest[-(ROWS - len(running)) :]], key=lambda job: job.number)
        table = Table()
        reached = ", ".join(self.names) or "objective"
        for column in ("job", "values", "state", reached, "time"):
            table.add_column(column, justify="right" if column in ("job", reached, "time") else "left")
        for job in rows:
            seconds = job.seconds + (time.monotonic() - began[job.number] if job.number in began else 0)
            state = "running" if job.number in began else job.state
            table.add_row(str(job.number), job.label, state, ", ".join(_reached(job)), _time(seconds))
        return table

    def _left(self, jobs: Sequence[Job], began: dict[int, float]) -> str:
        total = self.total if self.total is not None else len(jobs)
        counted = [f"{sum(job.state == state for job in jobs)} {state}" for state in ("complete", "pruned", "failed")]
        line = f"{len(began)} running, {', '.join(counted)} of {total}"
        times = [job.seconds for job in jobs if job.state == "complete"]
        left = total - sum(job.state in (*ENDED, "failed") for job in jobs)
        return f"{line}; about {_time(statistics.mean(times) * left / self.slots)} left" if times and left else line


def outcome(job: Job, names: Sequence[str] = ()) -> str:
    """How a job ended, and where its run is. Of a search, `names` are those of what it has reached."""
    if job.state == "pruned" and job.run_dir is None:
        return f"pruned, {job.sentence}"
    found = _reached(job)
    known = names if len(names) == len(found) else [""] * len(found)
    value = ", ".join(f"{name} {number}".strip() for name, number in zip(known, found, strict=True))
    place = "" if job.run_dir is None else f", {job.run_dir}"
    return f"{f'{job.state} {value}'.strip()} in {_time(job.seconds)}{place}"


def _reached(job: Job) -> list[str]:
    """What a search was told of the job, else the run's own objective."""
    values: Sequence[float | None] = job.values or [job.objective]
    return [f"{value:.4g}" for value in values if value is not None]


def _time(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, seconds = divmod(int(seconds), 60)
    return f"{minutes // 60} h {minutes % 60:02} min" if minutes >= 60 else f"{minutes} min {seconds:02} s"
