"""Runs a sweep from its command to its last job, or resumes it; each job in a process.

The sweep's process has only imported what a run needs, so jobs can't affect each other, and the imports are paid once.
"""

import atexit
import multiprocessing.process
import multiprocessing.util
import os
import signal
import statistics
import sys
import threading
import time
import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from filelock import FileLock
from hydra.core.plugins import Plugins
from hydra.core.utils import run_job, setup_globals
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

from lathe import files
from lathe.config.cpu_count import CPU_PROCESSES_PER_CORE, allowed_cpus
from lathe.config.override_parsing import as_typed, key_of
from lathe.config.resolve import resolve
from lathe.config.schema import problems, training_commands
from lathe.config.validate import check
from lathe.errors import Stopped, UserError, refuse, require
from lathe.launch.devices import read_nodes
from lathe.launch.elastic import die_with_parent, import_job
from lathe.launch.error_reporting import explain_error, prepare_stdio, report_error
from lathe.launch.external_launch import detect_external_launch
from lathe.launch.sweep.job_sources import Listed, Search, planned
from lathe.launch.sweep.sweep_dir import ENDED, FORMAT, HOW, Job, SweepDir, best_job, create_sweep, find_sweep
from lathe.runs.optuna_study import write_result
from lathe.runs.rundir import RunDir, run_command

ENDING = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1") if hasattr(signal, name))
FORKS = sys.platform.startswith("linux")  # on other systems, a fork after importing torch is not safe
# the queue here replaces Hydra's basic launcher, which runs jobs one after another in one process
BASIC = "hydra._internal.core_plugins.basic_launcher.BasicLauncher"
WITHOUT: dict[str, Any] = {  # of a user's sweep file with hydra.sweeper.params alone
    **dict.fromkeys(("axes", "runs", "remove", "repeats", "resume")),
    "jobs": "auto",
    "retries": 0,
    "silence": 3600,
}
ROWS = 24  # of a table; jobs beyond them are only counted
WATCH = 1.0  # seconds between looks at what a job has written
POLL = 0.02  # seconds between polls of the processes
IDLE = 1.0  # seconds between polls for a job, which another process may have abandoned


@dataclass(frozen=True)
class Context:
    """Hydra's context: `config` is composed without the keys that have several values, `task` is the job's function."""

    hydra: HydraContext
    task: TaskFunction
    config: DictConfig

    def composed(self, overrides: Sequence[str]) -> DictConfig:
        cfg: DictConfig = self.hydra.config_loader.load_sweep_config(self.config, list(overrides))
        return cfg

    def words_of(self, folder: SweepDir, job: Job) -> list[str]:
        """Return all overrides of a job, with its place in the sweep."""
        return [*job.overrides, f"sweep.folder={as_typed(str(folder.path))}", f"sweep.job={job.number}"]

    def run(self, folder: SweepDir, job: Job) -> Any:
        """Compose a job and run it in this process; return its objective."""
        setup_globals()
        config = self.composed(self.words_of(folder, job))
        with open_dict(config):
            config.hydra.job.id = config.hydra.job.num = job.number
        return run_job(self.task, config, "hydra.sweep.dir", "hydra.sweep.subdir", self.hydra).return_value


def run_sweep(context: Context, params: dict[str, Any], arguments: Sequence[str]) -> list[Job]:
    """Run the jobs of a sweep, in slots of this machine or with another Hydra launcher.

    `params` are values by key in addition to `arguments`, the typed overrides.
    """
    options = WITHOUT
    if context.config.get("sweep") is not None:
        options = WITHOUT | resolve(OmegaConf.masked_copy(context.config, ["sweep"]))["sweep"]
    refuse(sentence for _, sentence in problems({"sweep": options}, "train", saved=True))
    message = "A sweep (-m) under torchrun or srun would be run once per rank. Start it with python."
    require(detect_external_launch() is None, message)
    if context.config.hydra.runtime.choices.get("launch") != "slurm":  # which names the job itself
        launch: Any = OmegaConf.to_container(context.config.launch, resolve=True)
        launch_id = read_nodes(launch).launch_id
        require(launch_id is None, f"launch.id={launch_id} names one run, and a sweep (-m) has several. Leave it out.")
    in_slots = FORKS and context.config.hydra.launcher.get("_target_") == BASIC
    can_run = in_slots or FORKS or options["jobs"] in ("auto", 1)
    require(can_run, f"sweep.jobs={options['jobs']}: several jobs at a time need Linux. Leave it out.")
    slots = slots_of(options["jobs"], context.config.trainer) if in_slots else []
    overrides = [word for word in arguments if key_of(word).split(".")[0] != "sweep"]
    source = _source(context, overrides, params, options)
    identifying = [word for word in arguments if word.partition("=")[0] not in {f"sweep.{key}" for key in HOW}]
    named = {"format": FORMAT, "words": identifying, "name": str(context.config.get("name")), "where": os.getcwd()}
    identity = {**named, "sweep": options}
    log_dir = Path(str(context.config.paths.log_dir)).absolute()
    existing = find_sweep(log_dir, options["resume"], identity)
    folder = existing or create_sweep(log_dir, identity)
    try:
        source.prepare(folder)
    except UserError:
        if existing is None:  # the same command should not resume a sweep that never began
            files.remove(folder.path)
        raise
    already = sum(job.state in ("complete", "pruned") for job in folder.jobs())
    print(f"{f'Taking up {folder.path}, {already} done' if existing else folder.path}: {source.total} jobs", flush=True)
    if in_slots:
        _Queue(context, folder, source, slots, options).run()
    else:
        _run_through_launcher(context, folder, source, options["jobs"])
    jobs = folder.jobs()
    left = sum(job.state not in ENDED for job in jobs)
    if left:
        print(f"{left} jobs are left to other processes that are at this sweep.")
    else:
        print(f"Next:\n  {run_command('scripts/report.py', 'runs', folder.path)}")
    source.concluded(is_over=not left)
    return jobs


def _source(context: Context, overrides: list[str], params: dict[str, Any], options: dict[str, Any]) -> Listed:
    """Return the source of the jobs; raise UserError for the mistakes that all of them would end with."""
    loader: Any = context.hydra.config_loader
    jobs = planned(overrides, options, params, loader)
    configs = []
    for job in jobs:
        config = context.composed(job)
        configs.append(OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"]))
    if options.get("space") is not None:
        message = "a search draws the values that sweep.space names. Move the others there, or to sweep.repeats."
        require(len(jobs) == 1, message)
        return Search(context.composed, jobs[0], options, resolve(configs[0]))
    verb, shared = str(context.config.hydra.job.config_name), None
    for raw in configs if verb in training_commands() else ():
        try:
            cfg = resolve(raw)
            # a resumed run has its own configuration
            together = None if cfg.get("resume") is not None else ()
            mistakes = check(cfg, verb, together, OmegaConf.to_container(raw))
        except UserError as error:
            mistakes = [str(sentence) for sentence in error.args]
        shared = mistakes if shared is None else [sentence for sentence in shared if sentence in mistakes]
        if not shared:  # a mistake in some jobs is reported by those jobs
            break
    refuse(shared or [])
    return Listed(jobs, lambda: resolve(configs[0]))


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
            run_dir = f", {job.run_dir}" if job.run_dir else ""
            how = f"{' '.join([job.state, *numbers])} in {_time(job.seconds)}{run_dir}"
            how = f"{job.state}, {job.sentence}" if job.sentence else how
            self.say(f"{self.done} of {self.total}, job {job.number}, {job.label}: {how}")

    def update(self, jobs: Sequence[Job], began: dict[int, float], force: bool = False) -> None:
        """Update the table, at most four times a second. `began` are the start times of the running jobs."""
        if self.live is None or (time.monotonic() - self.shown < 0.25 and not force):
            return
        self.shown = time.monotonic()
        running = [job for job in jobs if job.number in began]
        rest = [job for job in jobs if job.number not in began and job.state != "waiting"]
        best = best_job(jobs, self.directions)
        table = Table("job", "values", "state", ", ".join(self.names) or "objective", "time")
        for job in sorted([*running, *rest[-(ROWS - len(running)) :]], key=lambda job: job.number):
            seconds = job.seconds + (time.monotonic() - began[job.number] if job.number in began else 0)
            number = ", ".join(_numbers(job)) + (" *" if job is best else "")
            table.add_row(str(job.number), job.label, job.state, number, _time(seconds))
        counted = [f"{sum(job.state == state for job in jobs)} {state}" for state in ENDED]
        line = f"{len(began)} running, {', '.join(counted)} of {self.total}"
        times = [job.seconds for job in jobs if job.state == "complete"]
        left = self.total - sum(job.state in ENDED for job in jobs)
        if times and left:
            line += f"; about {_time(statistics.mean(times) * left / self.slots)} left"
        self.live.update(Group(str(self.folder), table, line), refresh=True)


def _numbers(job: Job) -> list[str]:
    return [f"{value:.4g}" for value in job.reached]


def _time(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, seconds = divmod(int(seconds), 60)
    return f"{minutes // 60} h {minutes % 60:02} min" if minutes >= 60 else f"{minutes} min {seconds:02} s"


@dataclass
class Running:
    """One job's process. `claim` locks the job against other processes."""

    job: Job
    slot: dict[str, str]
    pid: int
    claim: FileLock
    began: float
    watch_at: float = 0.0
    hung: bool = False


class _Queue:
    """Runs jobs in slots of this machine until none is left or a signal ends the sweep."""

    def __init__(self, context: Context, folder: SweepDir, source: Listed, slots: Any, options: dict[str, Any]) -> None:
        self.context, self.folder, self.source = context, folder, source
        self.retries, self.silence = options["retries"], options["silence"]
        self.free: list[dict[str, str]] = list(slots)
        self.running: list[Running] = []
        self.jobs = folder.jobs()
        self.tried: Counter[int] = Counter()  # by this command
        done = sum(job.state in ENDED for job in self.jobs)
        self.table = ProgressTable(folder.path, len(slots), source.total, done, source.names, source.directions)

    def run(self) -> None:
        """Run jobs until none is left. The first signal lets them write checkpoints, the second kills them."""
        import_job("lathe.training.train")  # imports what every job needs before the first fork
        received: list[int] = []
        in_main = threading.current_thread() is threading.main_thread()  # other threads can't receive signals
        heard = [number for number in ENDING if in_main and signal.getsignal(number) is not signal.SIG_IGN]
        with ExitStack() as stack:
            for number in heard:
                stack.callback(signal.signal, number, signal.signal(number, lambda number, _: received.append(number)))
            stack.enter_context(self.table)
            passed_on, idle_until = 0, 0.0
            while True:
                while self.free and not received and time.monotonic() >= idle_until:
                    if (claimed := self._next()) is None:
                        idle_until = time.monotonic() + IDLE
                        continue
                    job, claim = claimed
                    slot, work = self.free.pop(0), partial(run_and_record, self.folder, job, self.context.run)
                    pid = fork(work, self.folder.file(job.number, "log"), slot)
                    self.running.append(Running(job, slot, pid, claim, time.monotonic()))
                if not self.running:
                    break
                for running in list(self.running):
                    self._watch(running)
                    pid, status = os.waitpid(running.pid, os.WNOHANG)
                    if pid:
                        idle_until = 0.0
                        self.running.remove(running)
                        self.free.append(running.slot)
                        self._end(running, os.waitstatus_to_exitcode(status), is_stopped=passed_on > 0)
                if len(received) > passed_on:
                    passed_on = len(received)
                    for running in self.running:
                        with suppress(ProcessLookupError):
                            if passed_on == 1:  # a job with workers forwards it
                                os.kill(running.pid, signal.SIGTERM)
                            else:
                                os.killpg(running.pid, signal.SIGKILL)
                    if passed_on == 1:
                        self.table.say("Stopping: the jobs write their checkpoints; once more ends them at once.")
                self.table.update(self.jobs, {running.job.number: running.began for running in self.running})
                time.sleep(POLL)
            self.table.update(self.jobs, {}, force=True)
        if received:
            stopped = Stopped(signal.Signals(received[0]).name, None)
            stopped.args = (f"{stopped}; the same command takes the sweep up again ({self.folder.path})",)
            raise stopped

    def _next(self) -> tuple[Job, FileLock] | None:
        """Return a job to run, claimed for this process, or None."""
        while True:
            self.jobs = self.folder.jobs()
            for job in self.jobs:
                claim = None
                if job.state not in ENDED and self.source.is_due(job):
                    claim = self.folder.claim(job.number)
                if claim is None:
                    continue
                with self.folder.adding():
                    job = self.folder.job(job.number)  # another process may have finished it
                    if job.state not in ENDED:
                        self.folder.begin(job)
                        self.tried[job.number] += 1
                        return job, claim
                claim.release()
            if not self.source.more():
                return None

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

    def _end(self, running: Running, code: int, is_stopped: bool) -> None:
        """Record and report a job whose process has ended, and the jobs that are not run because of it."""
        job = self.folder.job(running.job.number)
        job.seconds += time.monotonic() - running.began
        result = self.folder.result(job)
        if result:
            end_job(job, result)
        elif running.hung:
            job.state, job.sentence = "failed", f"killed after sweep.silence={self.silence:g} seconds without a line."
        elif is_stopped:
            job.state = "waiting"
        else:
            code = 128 - code if code - 128 in ENDING else code
            how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            memory = ", as Linux does where memory is short" if code == -signal.SIGKILL else ""
            job.state, job.sentence = "failed", f"its process died ({how}{memory})."
        keep_output(self.folder, job)
        if job.state == "failed" and self.tried[job.number] <= self.retries:
            self.table.ended(job, again=True)
            job.state = "waiting"
        if job.state == "waiting":
            self.folder.save(job)
        else:
            before = {other.number for other in self.folder.jobs() if other.state in ENDED}
            self.source.end(job)
            for ended in self.folder.jobs():
                if ended.state in ENDED and ended.number not in before:
                    self.table.ended(ended)
        running.claim.release()
        self.jobs = self.folder.jobs()


def _run_through_launcher(context: Context, folder: SweepDir, source: Listed, at_once: int | str) -> None:
    """Run the jobs with a Hydra launcher, such as submitit's: a list at once, a search in parts of `sweep.jobs`."""
    launcher = Plugins.instance().instantiate_launcher(
        hydra_context=context.hydra, task_function=context.task, config=context.config
    )
    most = None if not isinstance(source, Search) else at_once if isinstance(at_once, int) else 1
    while True:
        jobs = [job for job in folder.jobs() if job.state not in ENDED and source.is_due(job)]
        while (most is None or len(jobs) < most) and source.more():
            jobs = [job for job in folder.jobs() if job.state not in ENDED and source.is_due(job)]
        jobs = jobs[:most]
        if not jobs:
            return
        for job in jobs:
            folder.begin(job)
        returned = launcher.launch([context.words_of(folder, job) for job in jobs], initial_job_idx=0)
        for started, result in zip(jobs, returned, strict=True):
            job = folder.job(started.number)
            try:
                end_job(job, {"objective": None if result.return_value is None else float(result.return_value)})
            except Exception as error:
                end_job(job, {"sentence": " ".join(str(error).split())[:500] or type(error).__name__})
            source.end(job)


# -- the processes of jobs


def slots_of(jobs: int | str, trainer: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return the environment variables of each concurrent job; raise UserError if there are too few devices."""
    devices = trainer.get("devices")
    each = devices if isinstance(devices, int) and devices > 0 else len(devices) if isinstance(devices, list) else 1
    cards = _gpus() if trainer.get("accelerator") in ("auto", "gpu", "cuda") else []
    if cards:
        groups = [cards[first : first + each] for first in range(0, len(cards) - each + 1, each)]
        wanted = len(groups) if jobs == "auto" else int(jobs)
        capacity = f"{len(cards)} GPUs in groups of trainer.devices={each} hold {len(groups)} jobs at a time"
        require(0 < wanted <= len(groups), f"sweep.jobs={jobs}: {capacity}: lower sweep.jobs, or trainer.devices.")
        return [{"CUDA_VISIBLE_DEVICES": ",".join(group)} for group in groups[:wanted]]
    cores, count = len(allowed_cpus()), 1 if jobs == "auto" else int(jobs)
    most = cores * CPU_PROCESSES_PER_CORE
    message = f"sweep.jobs={jobs} of trainer.devices={each} are {count * each} processes. Use at most {most}."
    require(count * each <= most or count == 1, message)
    if count == 1 or "OMP_NUM_THREADS" in os.environ:
        return [{}] * count
    return [{"OMP_NUM_THREADS": str(max(1, cores // (count * each)))}] * count


def _gpus() -> list[str]:
    """Return CUDA_VISIBLE_DEVICES for each GPU, counted with NVML, after which a process can still fork."""
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    import torch

    count = torch.cuda.device_count()
    named = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return named[:count] if named else [str(index) for index in range(count)]


def keep_output(folder: SweepDir, job: Job) -> None:
    """Move the job's output into its run directory."""
    log = folder.file(job.number, "log")
    if job.run_dir is None or not Path(job.run_dir).is_dir() or not log.exists():
        return
    try:
        with files.open_plain(Path(job.run_dir, "output.log"), "ab") as file:
            file.write(log.read_bytes())
    except files.NotPlain as error:
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


def fork(work: Callable[[], int], log: Path, slot: dict[str, str]) -> int:
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
        # detach this process from its parent's group, signals and terminal; it dies with its parent
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
        os.environ.update(slot)
        if "OMP_NUM_THREADS" in slot:  # which torch has read already
            import torch

            torch.set_num_threads(int(slot["OMP_NUM_THREADS"]))
        code = work()
        threading._shutdown()  # type: ignore[attr-defined]  # these two are what Python runs at exit
        atexit._run_exitfuncs()
    except BaseException:  # no caller could handle it
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def run_and_record(folder: SweepDir, job: Job, work: Callable[[SweepDir, Job], Any]) -> int:
    """Run a job in this process by `work`, record its result in the study, and return the exit code."""
    try:
        value = work(folder, job)
    except SystemExit as error:  # stopped by a signal: no result
        return error.code if isinstance(error.code, int) else 1
    except Exception as error:
        report_error(error)
        explained = explain_error(error)
        sentence = str(explained) if explained else f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        write_result(folder.path, job.number, "result", {"sentence": sentence})
        return 1
    good = isinstance(value, (int, float)) and not isinstance(value, bool)
    write_result(folder.path, job.number, "result", {"objective": float(value) if good else None})
    return 0
