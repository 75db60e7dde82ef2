"""The running jobs of a sweep: starts, watches and ends their processes."""

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from lathe.errors import UserError
from lathe.files import NotPlain, open_plain
from lathe.launch.sweep.child import fork
from lathe.launch.sweep.devices import Slot
from lathe.launch.sweep.place import Job, SweepDir
from lathe.runs.rundir import RunDir

Work = Callable[[Job], Callable[[], Any]]  # returns the work of a job's process
STOPPED = {128 + getattr(signal, name) for name in ("SIGTERM", "SIGHUP", "SIGUSR1", "SIGINT") if hasattr(signal, name)}


@dataclass
class Running:
    """One job's process. `claim` locks the job against other processes."""

    job: Job
    slot: Slot
    pid: int
    claim: IO[str]
    began: float
    hung: bool = False


class Jobs:
    """The processes of a sweep's jobs, at most one for each slot."""

    def __init__(self, folder: SweepDir, slots: Sequence[Slot], work: Work, silence: float | None) -> None:
        self.folder, self.work, self.silence = folder, work, silence
        self.free = list(slots)
        self.running: list[Running] = []
        self.stopping = False

    def start(self, job: Job, claim: IO[str]) -> None:
        """Start a job that this process has claimed."""
        slot = self.free.pop(0)
        job.state, job.tries, job.sentence = "running", job.tries + 1, None
        self.folder.forget_run(job)  # it may have been moved or deleted; the job writes it again
        self.folder.save(job)
        outcome = self._outcome(job)
        outcome.unlink(missing_ok=True)
        pid = fork(self._alone(job), self.folder.log(job.number), outcome, slot.variables, slot.threads)
        self.running.append(Running(job, slot, pid, claim, time.monotonic()))

    def _alone(self, job: Job) -> Callable[[], Any]:
        """Return the job's work, which first closes the other jobs' claims: the process would keep them locked."""
        others, work = [running.claim for running in self.running], self.work(job)

        def alone() -> Any:
            for claim in others:
                claim.close()
            return work()

        return alone

    def ended(self) -> list[Job]:
        """Return the jobs whose processes have ended since the last call, with their outcomes."""
        found = []
        for running in list(self.running):
            self._watch(running)
            pid, status = os.waitpid(running.pid, os.WNOHANG)
            if pid:
                self.running.remove(running)
                self.free.append(running.slot)
                found.append(self._settled(running, os.waitstatus_to_exitcode(status)))
                running.claim.close()
        return found

    def signal(self, number: int) -> None:
        """Send a signal to every job's processes, and end the sweep."""
        self.stopping = True
        for running in self.running:
            with suppress(ProcessLookupError):
                if number == signal.SIGKILL:
                    os.killpg(running.pid, number)
                else:
                    os.kill(running.pid, number)  # a job with workers forwards it

    @property
    def began(self) -> dict[int, float]:
        """The start time of each running job, by number."""
        return {running.job.number: running.began for running in self.running}

    def _watch(self, running: Running) -> None:
        """Kill a job that has been silent for too long."""
        job = running.job
        if job.run_dir is None and (found := self.folder.job(job.number).run_dir) is not None:
            job.run_dir = found
            self.folder.save(job)
        if self.silence is None or running.hung or time.monotonic() - running.began < self.silence:
            return
        run = [] if job.run_dir is None else [Path(job.run_dir, name) for name in ("metrics.csv", "checkpoints", "")]
        written = [path.stat().st_mtime for path in (self.folder.log(job.number), *run) if path.exists()]
        if time.time() - max(written, default=0.0) > self.silence:
            running.hung = True
            with suppress(ProcessLookupError):
                os.killpg(running.pid, signal.SIGKILL)

    def _outcome(self, job: Job) -> Path:
        return self.folder.log(job.number).with_suffix(".out")

    def _settled(self, running: Running, code: int) -> Job:
        job, told = running.job, {}
        job.seconds += time.monotonic() - running.began
        job.run_dir = self.folder.job(job.number).run_dir
        with suppress(OSError, ValueError):
            told = json.loads(self._outcome(job).read_text())
        if "objective" in told:
            job.state, job.objective = "pruned" if was_pruned(job) else "complete", told["objective"]
        elif "sentence" in told:
            job.state, job.sentence = "failed", told["sentence"]
        elif running.hung:
            job.state, job.sentence = "failed", f"killed after sweep.silence={self.silence:g} seconds without a line."
        elif self.stopping:
            job.state = "waiting"
        else:
            code = 128 - code if code in STOPPED else code
            how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            memory = ", as Linux does where memory is short" if code == -signal.SIGKILL else ""
            job.state, job.sentence = "failed", f"its process died ({how}{memory})."
        self._keep_output(job)
        self.folder.save(job)
        self._outcome(job).unlink(missing_ok=True)
        return job

    def _keep_output(self, job: Job) -> None:
        """Move the job's output into its run directory."""
        log = self.folder.log(job.number)
        if job.run_dir is None or not Path(job.run_dir).is_dir() or not log.exists():
            return
        try:
            with open_plain(Path(job.run_dir, "output.log"), "ab") as file:
                file.write(log.read_bytes())
        except NotPlain as error:
            print(f"Note: {str(error).rstrip('.')}; what the job printed stays at {log}.", file=sys.stderr)
            return
        log.unlink()


def was_pruned(job: Job) -> bool:
    """Return whether the search ended the job's run early."""
    try:
        return job.run_dir is not None and "pruned" in RunDir(job.run_dir).result
    except (UserError, OSError):  # incomplete, or moved away at once
        return False
