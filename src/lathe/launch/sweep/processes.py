"""The processes of a sweep's jobs: their devices, how they are forked, watched and ended.

The sweep's process has only imported what a run needs, so jobs can't affect each other, and the imports are paid once.
"""

import atexit
import multiprocessing.process
import multiprocessing.util
import os
import signal
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock

from lathe.config.cpu_count import CPU_PROCESSES_PER_CORE
from lathe.errors import UserError, require
from lathe.files import NotPlain, open_plain
from lathe.launch.elastic import die_with_parent
from lathe.launch.error_reporting import explain_error, report_error
from lathe.launch.stdio import prepare_stdio
from lathe.launch.sweep.sweep_dir import Job, SweepDir
from lathe.runs.optuna_study import write_result
from lathe.runs.rundir import RunDir

Work = Callable[[Job], Any]  # runs a job in this process and returns its objective
ENDING = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1") if hasattr(signal, name))
WATCH = 1.0  # seconds between looks at what a job has written


@dataclass(frozen=True)
class Slot:
    """Resources of one job: environment variables, and torch's threads (None: torch's default)."""

    variables: Mapping[str, str] = field(default_factory=dict)
    threads: int | None = None


def slots_of(jobs: int | str, trainer: Mapping[str, Any]) -> list[Slot]:
    """Return a slot for each concurrent job; raise UserError if there are too few devices."""
    asked = trainer.get("devices")
    each = asked if isinstance(asked, int) and asked > 0 else len(asked) if isinstance(asked, list) else 1
    cards = _gpus() if trainer.get("accelerator") in ("auto", "gpu", "cuda") else []
    return _on_gpus(jobs, cards, each) if cards else _on_cores(jobs, each)


def _on_gpus(jobs: int | str, cards: list[str], each: int) -> list[Slot]:
    groups = [cards[first : first + each] for first in range(0, len(cards) - each + 1, each)]
    asked = len(groups) if jobs == "auto" else int(jobs)
    held = f"{len(cards)} GPUs in groups of trainer.devices={each} hold {len(groups)} jobs at a time"
    require(0 < asked <= len(groups), f"sweep.jobs={jobs}: {held}: lower sweep.jobs, or trainer.devices.")
    return [Slot({"CUDA_VISIBLE_DEVICES": ",".join(group)}) for group in groups[:asked]]


def _on_cores(jobs: int | str, each: int) -> list[Slot]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    count = 1 if jobs == "auto" else int(jobs)
    most = cores * CPU_PROCESSES_PER_CORE
    require(
        count * each <= most or count == 1,
        f"sweep.jobs={jobs} of trainer.devices={each} are {count * each} processes, and {cores} cores carry at most "
        f"{most}: lower either.",
    )
    if count == 1 or "OMP_NUM_THREADS" in os.environ:
        return [Slot()] * count
    threads = max(1, cores // (count * each))
    return [Slot({"OMP_NUM_THREADS": str(threads)}, threads)] * count


def _gpus() -> list[str]:
    """Return CUDA_VISIBLE_DEVICES for each GPU, counted with NVML, after which a process can still fork."""
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    import torch

    count = torch.cuda.device_count()
    named = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return named[:count] if named else [str(index) for index in range(count)]


@dataclass
class Running:
    """One job's process. `claim` locks the job against other processes."""

    job: Job
    slot: Slot
    pid: int
    claim: FileLock
    began: float
    watch_at: float = 0.0
    hung: bool = False


class Jobs:
    """The processes of a sweep's jobs, at most one for each slot."""

    def __init__(self, folder: SweepDir, slots: Sequence[Slot], work: Work, silence: float | None) -> None:
        self.folder, self.work, self.silence = folder, work, silence
        self.free = list(slots)
        self.running: list[Running] = []
        self.stopping = False

    def start(self, job: Job, claim: FileLock) -> None:
        """Start a job that this process has claimed and begun."""
        slot = self.free.pop(0)
        pid = fork(lambda: run_and_record(self.folder, job, self.work), self.folder.file(job.number, "log"), slot)
        self.running.append(Running(job, slot, pid, claim, time.monotonic()))

    def ended(self) -> list[Job]:
        """Return the jobs whose processes have ended since the last call."""
        found = []
        for running in list(self.running):
            self._watch(running)
            pid, status = os.waitpid(running.pid, os.WNOHANG)
            if pid:
                self.running.remove(running)
                self.free.append(running.slot)
                found.append(self._end(running, os.waitstatus_to_exitcode(status)))
                running.claim.release()
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
        """Show where a job's run is, and kill a job that has written nothing for `silence` seconds."""
        if time.monotonic() < running.watch_at:
            return
        running.watch_at = time.monotonic() + WATCH
        job = self.folder.job(running.job.number)
        if job.run_dir != running.job.run_dir:
            running.job.run_dir = job.run_dir
            self.folder.write_page(job)
        run = [] if job.run_dir is None else [Path(job.run_dir, name) for name in ("metrics.csv", "checkpoints", "")]
        files = [path for path in (self.folder.file(job.number, "log"), *run) if path.exists()]
        written = max((path.stat().st_mtime for path in files), default=0.0)
        silent = min(time.monotonic() - running.began, time.time() - written)
        if self.silence is not None and silent > self.silence:
            running.hung = True
            with suppress(ProcessLookupError):
                os.killpg(running.pid, signal.SIGKILL)

    def _end(self, running: Running, code: int) -> Job:
        """Return a job with how its process has ended. The sweep records it."""
        job = self.folder.job(running.job.number)
        job.seconds += time.monotonic() - running.began
        result = self.folder.result(job)
        if result:
            end_job(job, result)
        elif self.stopping and not running.hung:
            job.state = "waiting"
        elif running.hung:
            job.state, job.sentence = "failed", f"killed after sweep.silence={self.silence:g} seconds without a line."
        else:
            code = 128 - code if code - 128 in ENDING else code
            how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            memory = ", as Linux does where memory is short" if code == -signal.SIGKILL else ""
            job.state, job.sentence = "failed", f"its process died ({how}{memory})."
        self._keep_output(job)
        return job

    def _keep_output(self, job: Job) -> None:
        """Move the job's output into its run directory."""
        log = self.folder.file(job.number, "log")
        if job.run_dir is None or not Path(job.run_dir).is_dir() or not log.exists():
            return
        try:
            with open_plain(Path(job.run_dir, "output.log"), "ab") as file:
                file.write(log.read_bytes())
        except NotPlain as error:
            print(f"Note: {str(error).rstrip('.')}; what the job printed stays at {log}.", file=sys.stderr)
            return
        log.unlink()


def end_job(job: Job, result: Mapping[str, Any]) -> None:
    """Set a job's state by what its process has recorded."""
    if "sentence" in result:
        job.state, job.sentence = "failed", result["sentence"]
        return
    job.state, job.objective = "complete", result["objective"]
    with suppress(UserError, OSError):  # the run is incomplete, or was moved away at once
        if job.run_dir is not None and "pruned" in RunDir(job.run_dir).result:
            job.state = "pruned"


def fork(work: Callable[[], int], log: Path, slot: Slot) -> int:
    """Run `work`, which returns an exit code, in a forked process with its output in `log`; return its id."""
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    pid = os.fork()
    if pid:
        os.setpgid(pid, pid)  # both do, as either may come first
        return pid
    code = 1
    try:
        _detach(parent, log)
        os.environ.update(slot.variables)
        if slot.threads is not None:
            import torch

            torch.set_num_threads(slot.threads)
        code = work()
        threading._shutdown()  # type: ignore[attr-defined]  # these two are what Python runs at exit
        atexit._run_exitfuncs()
    except BaseException:  # no caller could handle it
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _detach(parent: int, log: Path) -> None:
    """Detach this process from its parent's group, signals and terminal. It dies with its parent."""
    os.setpgid(0, 0)
    atexit._clear()
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]  # such as the parent's temporary folders
    multiprocessing.process._children = set()  # type: ignore[attr-defined]
    for ending in (weakref.finalize._exitfunc, multiprocessing.util._exit_function):  # type: ignore[attr-defined]
        atexit.register(ending)
    die_with_parent()
    if os.getppid() != parent:  # it died before
        os._exit(1)
    for number in (*ENDING, signal.SIGCHLD):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))  # noqa: SIM115
    prepare_stdio()


def run_and_record(folder: SweepDir, job: Job, work: Work) -> int:
    """Run a job in this process, record its result in the study, and return the exit code."""
    try:
        value = work(job)
    except SystemExit as error:  # stopped by a signal: no result
        return error.code if isinstance(error.code, int) else 1
    except Exception as error:
        report_error(error)
        explained = explain_error(error)
        words = str(explained) if explained else f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        write_result(folder.path, job.number, "result", {"sentence": words})
        return 1
    good = isinstance(value, (int, float)) and not isinstance(value, bool)
    write_result(folder.path, job.number, "result", {"objective": float(value) if good else None})
    return 0
