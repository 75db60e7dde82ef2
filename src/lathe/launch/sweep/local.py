"""Runs jobs in slots of this machine until none is left or a signal ends the sweep."""

import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import IO, Any, Protocol

from lathe.launch.elastic import import_job
from lathe.launch.sweep.context import Context, SweepStopped
from lathe.launch.sweep.devices import Slot
from lathe.launch.sweep.jobs import Jobs
from lathe.launch.sweep.place import ENDED, Job, SweepDir
from lathe.launch.sweep.screen import Screen

SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1") if hasattr(signal, name))
POLL = 0.02  # seconds between polls of the processes
IDLE = 1.0  # seconds between polls for a job, which another process may have abandoned


class Source(Protocol):
    """The source of jobs: a list, or a search."""

    total: int | None
    names: Sequence[str]  # of a search; a direction (max or min) for each name
    directions: Sequence[str]
    again: bool  # retry jobs that failed in an earlier command

    def more(self, folder: SweepDir) -> Job | None:
        """Return another job, or None if there is none now."""

    def told(self, job: Job) -> list[Job]:
        """Process a finished job; return jobs that are skipped because of it."""


class _Sweep:
    def __init__(self, folder: SweepDir, source: Source, retries: int) -> None:
        self.folder, self.source, self.retries = folder, source, retries
        self.jobs = {job.number: job for job in folder.jobs()}
        self.tried: dict[int, int] = {}  # by this command

    def next(self) -> tuple[Job, IO[str]] | None:
        """Return a job to run, claimed for this process, or None."""
        for number in sorted(self.jobs):
            if self._open(self.jobs[number]) and (claim := self.folder.claim(number)) is not None:
                job = self.jobs[number] = self.folder.job(number)  # another process may have finished it
                if self._open(job):
                    self.tried[number] = self.tried.get(number, 0) + 1
                    return job, claim
                claim.close()
        job_or_none = self.source.more(self.folder)
        if job_or_none is None:
            return None
        self.jobs[job_or_none.number] = job_or_none
        return self.next()

    def told(self, job: Job) -> list[Job]:
        """Process a finished job; return jobs that are skipped because of it."""
        left = self.source.told(job)
        self.folder.save(job)
        self.jobs |= {other.number: other for other in left}
        return left

    @property
    def done(self) -> int:
        """The number of finished jobs."""
        return sum(job.state in ENDED for job in self.jobs.values())

    def tries_again(self, job: Job) -> bool:
        """Return whether this command retries a failed job."""
        tried = self.tried.get(job.number, 0)
        return tried <= self.retries if tried else self.source.again

    def _open(self, job: Job) -> bool:
        return self.tries_again(job) if job.state == "failed" else job.state not in ENDED


def run_here(
    context: Context, folder: SweepDir, source: Source, slots: Sequence[Slot], options: dict[str, Any]
) -> None:
    """Run jobs until none is left. The first signal lets them write checkpoints, the second kills them.

    Raises:
        SweepStopped: a signal ended the sweep.
    """
    import_job("lathe.training.train")  # imports what every job needs before the first fork
    sweep = _Sweep(folder, source, options["retries"])
    queue = Jobs(folder, slots, lambda job: lambda: context.run(folder, job), options["silence"])
    shown = Screen(folder.path, len(slots), source.total, sweep.done, source.names, source.directions)
    with _heard() as received, shown as screen:
        passed_on, idle_until = 0, 0.0
        while True:
            while queue.free and not received and time.monotonic() >= idle_until:
                if (found := sweep.next()) is None:
                    idle_until = time.monotonic() + IDLE
                else:
                    queue.start(*found)
            if not queue.running:
                break
            for job in queue.ended():
                idle_until = 0.0
                if job.state == "failed" and sweep.tries_again(job):
                    screen.ended(job, again=True)
                elif job.state != "waiting":
                    for ended in (job, *sweep.told(job)):
                        screen.ended(ended)
            if len(received) > passed_on:
                passed_on = len(received)
                queue.signal(signal.SIGTERM if passed_on == 1 else signal.SIGKILL)
                if passed_on == 1:
                    screen.say("Stopping: the jobs write their checkpoints; once more ends them at once.")
            screen.update(list(sweep.jobs.values()), queue.began)
            time.sleep(POLL)
        screen.update(list(sweep.jobs.values()), {}, force=True)
    if received:
        raise SweepStopped(signal.Signals(received[0]).name, folder.path)


@contextmanager
def _heard() -> Iterator[list[int]]:
    """Collect signals instead of handling them; outside the main thread, which can't receive any, none."""
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    heard = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, lambda number, _: received.append(number)) for number in heard}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
