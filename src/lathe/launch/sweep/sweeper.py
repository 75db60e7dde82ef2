"""Runs a sweep from its command to its last job, or resumes it."""

import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock
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
from lathe.launch.sweep.job_sources import Listed, Search
from lathe.launch.sweep.processes import ENDING, Jobs, Slot, end_job, slots_of
from lathe.launch.sweep.progress_table import ProgressTable
from lathe.launch.sweep.search_space import planned
from lathe.launch.sweep.sweep_dir import ENDED, Job, SweepDir, create_sweep, find_sweep, identity_of
from lathe.runs.rundir import run_command

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
    already = sum(job.state in ("complete", "pruned") for job in folder.jobs())
    print(f"{f'Taking up {folder.path}, {already} done' if found else folder.path}: {source.total} jobs", flush=True)
    if here:
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
    configs = [context.composed(job) for job in jobs]
    if options.get("space") is None:
        refuse(_mistakes_of_all(configs))
        return Listed(jobs, lambda: _resolved(configs[0]))
    require(
        len(jobs) == 1,
        f"a search draws the values that sweep.space names, and {len(jobs)} combinations of others were typed: move "
        "them there, or run each trial with all of them by sweep.repeats={seed: [1, 2, 3]}.",
    )
    return Search(context.composed, context.loader.get_group_options, jobs[0], options, _resolved(configs[0]))


def _resolved(job: DictConfig) -> dict[str, Any]:
    """Return a job's configuration without `hydra`."""
    return resolve(OmegaConf.masked_copy(job, [str(key) for key in job if key != "hydra"]))


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
        self.jobs = folder.jobs()
        self.tried: Counter[int] = Counter()  # by this command
        self.processes = Jobs(folder, slots, lambda job: context.run(folder, job), options["silence"])
        done = sum(job.state in ENDED for job in self.jobs)
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
                self.table.update(self.jobs, self.processes.began)
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
                if (
                    job.state in ENDED
                    or not self.source.is_due(job)
                    or (claim := self.folder.claim(job.number)) is None
                ):
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

    def _end(self, job: Job) -> None:
        """Record and report a job that has ended, and the jobs that are not run because of it."""
        again = job.state == "failed" and self.tried[job.number] <= self.retries
        if again:
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
        self.jobs = self.folder.jobs()


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
