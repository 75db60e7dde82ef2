"""The directory of a sweep, and its jobs. Imports no torch.

logs/sweeps/<date>_<time>_<short id>/ has sweep.yaml, the Optuna study of the jobs (study.log, unless `sweep.storage`
names a database), a job's output until it has a run directory, and `done` once every job is. jobs/<number>.json shows a
job to people and reports; the sweep itself reads the study only. One process at a time owns a job, with a lock that the
kernel releases however the process ends. So the same command resumes an interrupted sweep, and joins a running one.
"""

import json
import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from omegaconf import OmegaConf

from lathe.errors import UserError, require
from lathe.files import whole, write_atomically
from lathe.runs.optuna_study import is_own, open_study, trial_id
from lathe.trust.safe_yaml import as_yaml

FORMAT = 2
HOW = ("jobs", "retries", "silence", "resume", "folder", "job", "trials")  # may change when a sweep is resumed
ENDED = ("complete", "pruned", "failed")  # other states are waiting and running
RECORD = ("state", "run_dir", "objective", "values", "tries", "seconds", "sentence")


@dataclass
class Job:
    """One job, as in jobs/<number>.json.

    `label` are the overrides that distinguish it from other jobs, `trial` is the number of its trial in the study, and
    `repeat` its index among the trial's jobs. `values` are its results for a search.
    """

    number: int
    overrides: list[str]
    label: str = "as it is"
    trial: int = 0
    repeat: int = 0
    state: str = "waiting"
    run_dir: str | None = None
    objective: float | None = None
    values: list[float] = field(default_factory=list)
    tries: int = 0
    seconds: float = 0.0
    sentence: str | None = None

    @property
    def reached(self) -> list[float]:
        """Its values for a search, or its run's own objective."""
        return self.values or ([] if self.objective is None else [self.objective])


class SweepDir:
    """The directory of one sweep."""

    study: Any  # once it is open

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()

    @property
    def facts(self) -> dict[str, Any]:
        """The content of sweep.yaml."""
        try:
            content: Any = OmegaConf.to_container(OmegaConf.load(self.path / "sweep.yaml"))
            good = content["format"] == FORMAT
        except Exception as error:  # a damaged YAML file can raise nearly anything
            raise UserError(f"{self.path} is not a sweep: its sweep.yaml can't be read.") from error
        require(good, f"{self.path} is a sweep of another version, which can't be resumed.")
        return {str(key): value for key, value in content.items()}

    def open(self, directions: Sequence[str]) -> None:
        """Open the study, or create it with a direction, max or min, for each objective."""
        self.study = open_study(self.path, self.facts, directions)

    def finish(self) -> None:
        """Mark the sweep as done: the same command begins a new one."""
        write_atomically(self.path / "done", f"{datetime.now():%Y-%m-%d %H:%M:%S}\n")
        for path in (self.path / "jobs").glob("*.lock"):
            path.unlink(missing_ok=True)

    def file(self, number: int, suffix: str) -> Path:
        """Return the path of a job's file: json, log or lock."""
        return self.path / "jobs" / f"{number:05}.{suffix}"

    def trials(self) -> list[Any]:
        return list(self.study.get_trials(deepcopy=False))

    def jobs(self) -> list[Job]:
        """Return the jobs so far, by number."""
        jobs = {}
        for trial in self.trials():
            attributes = trial.user_attrs if is_own(trial, self.path) else {}
            for repeat, (number, overrides, label) in enumerate(attributes.get("jobs", ())):
                jobs[number] = Job(number, overrides, label, trial.number, repeat, **attributes.get(f"job{repeat}", {}))
                jobs[number].run_dir = attributes.get(f"run_dir{repeat}") or jobs[number].run_dir
        return [jobs[number] for number in sorted(jobs)]

    def job(self, number: int) -> Job:
        return next(job for job in self.jobs() if job.number == number)

    def jobs_of(self, trial: int) -> list[Job]:
        return [job for job in self.jobs() if job.trial == trial]

    def result(self, job: Job) -> dict[str, Any]:
        """Return what the job's process has recorded: its objective or the sentence that it failed with."""
        trial = self.study._storage.get_trial(trial_id(self.study, job.trial))
        return trial.user_attrs.get(f"result{job.repeat}") or {}

    def save(self, job: Job) -> None:
        page = asdict(job)
        self._set(job, f"job{job.repeat}", {key: page[key] for key in RECORD})
        self.write_page(job)

    def begin(self, job: Job) -> None:
        """Record that a job runs, and forget its previous try."""
        import optuna

        self.study._storage.set_trial_state_values(trial_id(self.study, job.trial), optuna.trial.TrialState.RUNNING)
        for name in ("run_dir", "result") if job.tries else ():  # its run may have been moved or deleted
            self._set(job, f"{name}{job.repeat}", None)
        job.state, job.tries, job.sentence, job.run_dir = "running", job.tries + 1, None, None
        self.save(job)

    def write_page(self, job: Job) -> None:
        """Write jobs/<number>.json."""
        write_atomically(self.file(job.number, "json"), json.dumps(asdict(job), indent=1) + "\n")

    def _set(self, job: Job, name: str, value: Any) -> None:
        self.study._storage.set_trial_user_attr(trial_id(self.study, job.trial), name, value)

    @contextmanager
    def adding(self) -> Iterator[None]:
        """Lock out other processes that add jobs or end trials."""
        with FileLock(self.path / ".lock"):
            yield

    def claim(self, number: int) -> FileLock | None:
        """Lock a job until the lock is released; None if another process has it."""
        lock = FileLock(self.file(number, "lock"))
        with suppress(Timeout):
            lock.acquire(timeout=0)
            return lock
        return None


def best_job(jobs: Sequence[Job], directions: Sequence[str]) -> Job | None:
    """Return the best of several complete jobs with one objective."""
    done = [job for job in jobs if job.state == "complete" and len(job.reached) == 1]
    if len(directions) != 1 or len(done) < 2:
        return None
    return (max if directions[0] == "max" else min)(done, key=lambda job: job.reached[0])


def find_sweep(log_dir: Path, resume: str | None, identity: dict[str, Any]) -> SweepDir | None:
    """Return the sweep of `resume`, or the newest unfinished one of the same command."""
    if resume is not None:
        sweep = SweepDir(Path(resume).resolve())
        message = f"sweep.resume={resume} is not the directory of a sweep: name one of {log_dir / 'sweeps'}."
        require((sweep.path / "sweep.yaml").is_file(), message)
        before = sweep.facts["words"]
        message = f"sweep.resume={resume} is the sweep of {' '.join(before) or 'no overrides'}: type these alone."
        require(before == identity["words"], message)
        return sweep

    def same(facts: dict[str, Any]) -> dict[str, Any]:
        """What must be equal in two commands of one sweep: all but how its jobs are run."""
        return {**facts, "sweep": {key: value for key, value in facts["sweep"].items() if key not in HOW}}

    for path in sorted((log_dir / "sweeps").glob("*/sweep.yaml"), key=os.path.getmtime, reverse=True):
        sweep = SweepDir(path.parent)
        with suppress(UserError):  # of another version
            if not (path.parent / "done").exists() and same(sweep.facts) == same(identity):
                return sweep
    return None


def create_sweep(log_dir: Path, identity: dict[str, Any]) -> SweepDir:
    """Create `<log_dir>/sweeps/<date>_<time>_<short id>`."""
    path = log_dir.absolute() / "sweeps" / f"{datetime.now():%Y-%m-%d_%H-%M-%S}_{secrets.token_hex(3)}"
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole(path) as making:  # a killed process leaves no directory without sweep.yaml
        (making / "jobs").mkdir(parents=True)
        write_atomically(making / "sweep.yaml", as_yaml(identity))
    return SweepDir(path)
