"""Runs a sweep from its command to its last job, or resumes it."""

import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from hydra.core.plugins import Plugins
from hydra.core.utils import run_job, setup_globals
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict

from lathe import files
from lathe.config.override_parsing import as_typed, key_of
from lathe.config.resolve import resolve
from lathe.config.schema import problems, training_commands
from lathe.config.validate import check
from lathe.errors import Stopped, UserError, refuse, require
from lathe.launch.devices import read_nodes
from lathe.launch.elastic import import_job
from lathe.launch.external_launch import detect_external_launch
from lathe.launch.sweep.optuna_search import Search
from lathe.launch.sweep.processes import ENDING, Jobs, Slot, slots_of, was_pruned
from lathe.launch.sweep.progress_table import ProgressTable, best_job, metric_of
from lathe.launch.sweep.search_space import planned
from lathe.launch.sweep.sweep_dir import ENDED, Job, SweepDir, create_sweep, find_sweep, identity_of
from lathe.runs.rerun_command import run_command

# The queue here replaces Hydra's basic launcher, which runs jobs one after another in one process.
FORKS = sys.platform.startswith("linux")  # on other systems, a fork after importing torch is not safe
BASIC = "hydra._internal.core_plugins.basic_launcher.BasicLauncher"
WITHOUT: dict[str, Any] = {  # of a user's sweep file with hydra.sweeper.params alone
    **dict.fromkeys(("axes", "runs", "remove", "repeats", "resume")),
    "jobs": "auto",
    "retries": 0,
    "silence": 3600,
}
POLL = 0.02  # seconds between polls of the processes
IDLE = 1.0  # seconds between polls for a job, which another process may have abandoned


@dataclass(frozen=True)
class Context:
    """Hydra's context: `config` is composed without the keys that have several values, `task` is the job's function."""

    hydra: HydraContext
    task: TaskFunction
    config: DictConfig

    @property
    def loader(self) -> Any:
        """Hydra's config loader."""
        return self.hydra.config_loader

    def composed(self, words: Sequence[str]) -> DictConfig:
        """Compose a job's configuration, with `hydra`."""
        found: DictConfig = self.loader.load_sweep_config(self.config, list(words))
        return found

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

    Raises:
        UserError: the sweep can't be run, or jobs failed.
        Stopped: a signal ended it.
    """
    options = _options(context)
    _check_alone(context)
    here = FORKS and context.config.hydra.launcher.get("_target_") == BASIC
    require(
        here or FORKS or options["jobs"] in ("auto", 1),
        f"sweep.jobs={options['jobs']}: several jobs at a time need Linux: leave it out.",
    )
    slots = slots_of(options["jobs"], context.config.trainer) if here else []
    words = [word for word in arguments if key_of(word).split(".")[0] != "sweep"]
    source = _source(context, words, params, options)
    identity = identity_of(arguments, str(context.config.get("name")), options)
    log_dir = Path(str(context.config.paths.log_dir)).absolute()
    found = find_sweep(log_dir, options["resume"], identity)
    folder = found or create_sweep(log_dir, identity)
    try:
        source.prepare(folder)
    except UserError:
        if found is None:  # the same command should not resume a sweep that never began
            files.remove(folder.path)
        raise
    already = sum(job.state in ENDED for job in folder.jobs())
    print(f"{f'Taking up {folder.path}, {already} done' if found else folder.path}: {source.total} jobs", flush=True)
    if here:
        _Queue(context, folder, source, slots, options).run()
    else:
        _run_through_launcher(context, folder, source, options["jobs"])
    source.concluded()
    return _concluded(folder, source)


def _options(context: Context) -> dict[str, Any]:
    """Return the group sweep; raise UserError for a missing or invalid value."""
    options = WITHOUT
    if context.config.get("sweep") is not None:
        options = WITHOUT | resolve(OmegaConf.masked_copy(context.config, ["sweep"]))["sweep"]
    refuse(sentence for _, sentence in problems({"sweep": options}, "train", saved=True))
    return options


def _check_alone(context: Context) -> None:
    """Raise UserError for what a sweep can't be combined with."""
    require(
        detect_external_launch() is None,
        "A sweep (-m) under torchrun or srun would be run once per rank: start it with python, or sweep outside.",
    )
    if context.config.hydra.runtime.choices.get("launch") == "slurm":  # which names the job itself
        return
    launch: Any = OmegaConf.to_container(context.config.launch, resolve=True)
    launch_id = read_nodes(launch).launch_id
    require(
        launch_id is None,
        f"launch.id={launch_id} names one run, and a sweep (-m) has several: leave launch.id and launch.nodes out.",
    )


def _source(context: Context, words: list[str], params: dict[str, Any], options: dict[str, Any]) -> "Listed | Search":
    """Return the source of the jobs."""
    jobs = planned(words, options, params, context.loader)
    if options.get("space") is None:
        refuse(_mistakes_of_all([context.composed(job) for job in jobs]))
        return Listed(jobs)
    require(
        len(jobs) == 1,
        f"a search draws the values that sweep.space names, and {len(jobs)} combinations of others were typed: move "
        "them there, or run each trial with all of them by sweep.repeats={seed: [1, 2, 3]}.",
    )
    return Search(context.composed, context.loader.get_group_options, jobs[0], options)


def _mistakes_of_all(jobs: Sequence[DictConfig]) -> list[str]:
    """Return the mistakes that all jobs would end with. A mistake in some jobs is reported by those jobs."""
    shared: list[str] | None = None
    for job in jobs:
        verb = str(job.hydra.job.config_name)
        raw = OmegaConf.masked_copy(job, [str(key) for key in job if key != "hydra"])
        try:
            cfg = resolve(raw)
            # a resumed run has its own configuration
            together = None if cfg.get("resume") is not None else ()
            found = check(cfg, verb, together, OmegaConf.to_container(raw)) if verb in training_commands() else []
        except UserError as error:
            found = [str(sentence) for sentence in error.args]
        shared = found if shared is None else [sentence for sentence in shared if sentence in found]
        if not shared:
            break
    return shared or []


class Listed:
    """Jobs that are known from the start, by their overrides. Failed ones are run `again` by the same command."""

    again = True
    names: Sequence[str] = ()
    directions: Sequence[str] = ()

    def __init__(self, jobs: Sequence[list[str]]) -> None:
        self.jobs = jobs
        self.total = len(jobs)
        shared = set.intersection(*map(set, jobs)) if len(jobs) > 1 else set()
        self.labels = [" ".join(word for word in words if word not in shared) or "as it is" for words in jobs]

    def prepare(self, folder: SweepDir) -> None:
        """Write the jobs that have no file yet."""
        self.folder = folder
        with folder.adding():
            there = {job.number for job in folder.jobs()}
            for number, words in enumerate(self.jobs):
                if number not in there:
                    folder.save(Job(number, words, self.labels[number]))

    def more(self, folder: SweepDir) -> Job | None:
        """Return None: all jobs exist."""
        return None

    def told(self, job: Job) -> list[Job]:
        """Return no jobs: they are independent."""
        return []

    def unfinished(self, folder: SweepDir) -> int:
        """Return 0: all jobs exist."""
        return 0

    def concluded(self) -> None:
        """Print the best job."""
        jobs = self.folder.jobs()
        names = metric_of(jobs)
        best = best_job(jobs, names)
        if best is not None:
            print(f"Best {names[0]}, {best.objective:.4g}: job {best.number}, {best.label}")


class _Queue:
    """Runs jobs in slots of this machine until none is left or a signal ends the sweep."""

    def __init__(
        self,
        context: Context,
        folder: SweepDir,
        source: Listed | Search,
        slots: Sequence[Slot],
        options: dict[str, Any],
    ) -> None:
        self.folder, self.source, self.retries = folder, source, options["retries"]
        self.jobs = {job.number: job for job in folder.jobs()}
        self.tried: dict[int, int] = {}  # by this command
        self.processes = Jobs(folder, slots, lambda job: lambda: context.run(folder, job), options["silence"])
        done = sum(job.state in ENDED for job in self.jobs.values())
        self.table = ProgressTable(folder.path, len(slots), source.total, done, source.names, source.directions)

    def run(self) -> None:
        """Run jobs until none is left. The first signal lets them write checkpoints, the second kills them.

        Raises:
            Stopped: a signal ended the sweep.
        """
        import_job("lathe.training.train")  # imports what every job needs before the first fork
        with _heard() as received, self.table:
            passed_on, idle_until = 0, 0.0
            while True:
                while self.processes.free and not received and time.monotonic() >= idle_until:
                    if (found := self._next()) is None:
                        idle_until = time.monotonic() + IDLE
                    else:
                        self.processes.start(*found)
                if not self.processes.running:
                    break
                for job in self.processes.ended():
                    idle_until = 0.0
                    self._end(job)
                if len(received) > passed_on:
                    passed_on = len(received)
                    self.processes.signal(signal.SIGTERM if passed_on == 1 else signal.SIGKILL)
                    if passed_on == 1:
                        self.table.say("Stopping: the jobs write their checkpoints; once more ends them at once.")
                self.table.update(list(self.jobs.values()), self.processes.began)
                time.sleep(POLL)
            self.table.update(list(self.jobs.values()), {}, force=True)
        if received:
            stopped = Stopped(signal.Signals(received[0]).name, None)
            stopped.args = (f"{stopped}; the same command takes the sweep up again ({self.folder.path})",)
            raise stopped

    def _next(self) -> tuple[Job, IO[str]] | None:
        """Return a job to run, claimed for this process, or None."""
        while True:
            for number in sorted(self.jobs):
                if self._is_open(self.jobs[number]) and (claim := self.folder.claim(number)) is not None:
                    job = self.jobs[number] = self.folder.job(number)  # another process may have finished it
                    if self._is_open(job):
                        self.tried[number] = self.tried.get(number, 0) + 1
                        return job, claim
                    claim.close()
            if (new := self.source.more(self.folder)) is None:
                return None
            self.jobs[new.number] = new

    def _end(self, job: Job) -> None:
        """Report a job that has ended, and the jobs that are skipped because of it."""
        if job.state == "failed" and self._tries_again(job):
            self.table.ended(job, again=True)
        elif job.state != "waiting":
            skipped = self.source.told(job)
            self.folder.save(job)
            self.jobs |= {other.number: other for other in skipped}
            for ended in (job, *skipped):
                self.table.ended(ended)

    def _tries_again(self, job: Job) -> bool:
        """Return whether this command retries a failed job."""
        tried = self.tried.get(job.number, 0)
        return tried <= self.retries if tried else self.source.again

    def _is_open(self, job: Job) -> bool:
        return self._tries_again(job) if job.state == "failed" else job.state not in ENDED


@contextmanager
def _heard() -> Iterator[list[int]]:
    """Collect signals instead of handling them; outside the main thread, which can't receive any, none."""
    received: list[int] = []
    heard = [number for number in ENDING if signal.getsignal(number) is not signal.SIG_IGN]
    if threading.current_thread() is not threading.main_thread():
        heard = []
    before = {number: signal.signal(number, lambda number, _: received.append(number)) for number in heard}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _run_through_launcher(context: Context, folder: SweepDir, source: Listed | Search, at_once: int | str) -> None:
    """Run the jobs with a Hydra launcher, such as submitit's: a list at once, a search in parts of `sweep.jobs`."""
    launcher = Plugins.instance().instantiate_launcher(
        hydra_context=context.hydra, task_function=context.task, config=context.config
    )
    jobs = [job for job in folder.jobs() if job.state not in ENDED and (source.again or job.state != "failed")]
    most = at_once if isinstance(at_once, int) else 1
    while jobs := jobs or [job for _ in range(most) if (job := source.more(folder)) is not None]:
        for job in jobs:
            folder.forget_run(job)
            folder.save(job)
        returned = launcher.launch([context.words_of(folder, job) for job in jobs], initial_job_idx=0)
        for job, result in zip(jobs, returned, strict=True):
            job.run_dir, job.tries = folder.job(job.number).run_dir, job.tries + 1
            try:
                value = result.return_value
                job.objective, job.sentence = None if value is None else float(value), None
                job.state = "pruned" if was_pruned(job) else "complete"
            except Exception as error:
                job.state, job.sentence = "failed", " ".join(str(error).split())[:500] or type(error).__name__
            source.told(job)
            folder.save(job)
        jobs = []


def _concluded(folder: SweepDir, source: Listed | Search) -> list[Job]:
    """Print how the jobs ended, and mark the sweep as done if all are.

    Failed jobs of a list are retried by the same command; failed trials of a search count.

    Raises:
        UserError: jobs of a list failed, or all trials of a search.
    """
    jobs = folder.jobs()
    failed = [job for job in jobs if job.state == "failed"]
    left = sum(job.state not in (*ENDED, "failed") for job in jobs) + source.unfinished(folder)
    if not left and not (source.again and failed):
        folder.finish()
    if left:
        print(f"{left} jobs are left to other processes that are at this sweep.")
    else:
        print(f"Next:\n  {run_command('scripts/report.py', 'runs', folder.path)}")
    trials = {job.of_trial for job in jobs}
    if failed and (source.again or trials == {job.of_trial for job in failed}):
        again = "The same command tries them again, and keeps the others."
        way = again if source.again else "No trial is left to go by."
        told = str(failed[0].sentence)
        ended = told if told.endswith("?") else f"{told.rstrip('.')}."
        raise UserError(
            f"{len(failed)} of {len(jobs)} jobs failed, the first of them ({failed[0].label}) with: {ended} {way}"
        )
    return jobs
