"""The directory of a sweep: its overrides, and the state of each job. Imports no torch.

logs/sweeps/<date>_<time>_<short id>/ has sweep.yaml, jobs/<number>.json, a job's output until it has a run directory, a
search's study, and `done` once every job is. One process at a time owns a job, with a lock that the kernel releases
however the process ends. So the same command resumes an interrupted sweep, and joins a running one.
"""

import json
import os
import secrets
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import IO, Any

from omegaconf import OmegaConf

from lathe.errors import UserError, require
from lathe.files import whole, write_atomically
from lathe.trust import read_json
from lathe.trust.safe_yaml import as_yaml

FORMAT = 1
HOW = ("jobs", "retries", "silence", "resume", "folder", "job", "trials")  # may change when a sweep is resumed
ENDED = ("complete", "pruned")  # not run again; other states are waiting, running and failed


@dataclass
class Job:
    """One job, as in jobs/<number>.json.

    `label` are the overrides that distinguish it from other jobs, `values` its results for a search. `trial` is its
    trial of the search (None: its own number), and `repeat` its index among the trial's runs.
    """

    number: int
    overrides: list[str]
    label: str = "as it is"
    state: str = "waiting"
    run_dir: str | None = None
    objective: float | None = None
    values: list[float] = field(default_factory=list)
    tries: int = 0
    seconds: float = 0.0
    sentence: str | None = None
    trial: int | None = None
    repeat: int = 0

    @property
    def of_trial(self) -> int:
        """The number of its trial."""
        return self.number if self.trial is None else self.trial


class SweepDir:
    """The directory of one sweep."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()

    @property
    def facts(self) -> dict[str, Any]:
        """The content of sweep.yaml."""
        try:
            found: Any = OmegaConf.to_container(OmegaConf.load(self.path / "sweep.yaml"))
            good = found["format"] == FORMAT
        except Exception as error:  # a damaged YAML file can raise nearly anything
            raise UserError(f"{self.path} is not a sweep: its sweep.yaml can't be read.") from error
        require(good, f"{self.path} is a sweep of another version, which can't be resumed.")
        return {str(key): value for key, value in found.items()}

    @property
    def done(self) -> bool:
        """True once all jobs are done."""
        return (self.path / "done").exists()

    def finish(self) -> None:
        """Mark the sweep as done: the same command begins a new one. Remove the files of running jobs."""
        write_atomically(self.path / "done", f"{datetime.now():%Y-%m-%d %H:%M:%S}\n")
        for path in [*(self.path / "jobs").glob("*.lock"), *(self.path / "jobs").glob("*.run")]:
            path.unlink(missing_ok=True)

    def file(self, number: int, suffix: str) -> Path:
        """Return the path of a job's file: json, log, out (its outcome), run (the path of its run) or lock."""
        return self.path / "jobs" / f"{number:05}.{suffix}"

    def jobs(self) -> list[Job]:
        """Return the jobs so far, by number."""
        return [self.job(int(path.stem)) for path in sorted((self.path / "jobs").glob("[0-9]*.json"))]

    def trials(self) -> dict[int, list[Job]]:
        """Return the jobs so far of each trial, by the trial's number."""
        found: dict[int, list[Job]] = {}
        for job in self.jobs():
            found.setdefault(job.of_trial, []).append(job)
        return found

    def job(self, number: int) -> Job:
        """Read a job."""
        path, pointer = self.file(number, "json"), self.file(number, "run")
        job = Job(**read_json(path, str(path)))
        if job.run_dir is None and pointer.exists():
            job.run_dir = pointer.read_text()
        return job

    def save(self, job: Job) -> None:
        """Write a job's state."""
        write_atomically(self.file(job.number, "json"), json.dumps(asdict(job), indent=1) + "\n")

    def forget_run(self, job: Job) -> None:
        """Remove the path of the job's run, which the job will write again."""
        job.run_dir = None
        self.file(job.number, "run").unlink(missing_ok=True)

    @contextmanager
    def adding(self) -> Iterator[None]:
        """Lock out other processes that add jobs."""
        with open(self.path / ".lock", "a") as file:
            _lock(file, wait=True)
            yield

    def claim(self, number: int) -> IO[str] | None:
        """Lock a job until the returned file is closed; None if another process has it."""
        file = open(self.file(number, "lock"), "a")  # noqa: SIM115 (held while the job runs)
        if _lock(file, wait=False):
            return file
        file.close()
        return None


def _lock(file: IO[str], wait: bool) -> bool:
    if sys.platform == "win32":  # Windows has no flock: a sweep is not shared
        return True
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        return False
    return True


def find_sweep(log_dir: Path, resume: str | None, identity: dict[str, Any]) -> SweepDir | None:
    """Return the sweep of `resume`, or the newest unfinished one of the same command."""
    if resume is not None:
        found = SweepDir(Path(resume).resolve())
        require(
            (found.path / "sweep.yaml").is_file(),
            f"sweep.resume={resume} is not the directory of a sweep: name one of {log_dir / 'sweeps'}.",
        )
        before = _kept(found.facts["words"])
        require(
            before == identity["words"],
            f"sweep.resume={resume} is the sweep of {' '.join(before) or 'no overrides'}: type these alone.",
        )
        return found
    for path in sorted((log_dir / "sweeps").glob("*/sweep.yaml"), key=os.path.getmtime, reverse=True):
        found = SweepDir(path.parent)
        with suppress(UserError):  # of another version
            if not found.done and _what(found.facts) == _what(identity):
                return found
    return None


def create_sweep(log_dir: Path, identity: dict[str, Any]) -> SweepDir:
    """Create `<log_dir>/sweeps/<date>_<time>_<short id>`."""
    path = log_dir.absolute() / "sweeps" / f"{datetime.now():%Y-%m-%d_%H-%M-%S}_{secrets.token_hex(3)}"
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole(path) as making:  # a killed process leaves no directory without sweep.yaml
        (making / "jobs").mkdir(parents=True)
        write_atomically(making / "sweep.yaml", as_yaml(identity))
    return SweepDir(path)


def identity_of(words: Sequence[str], name: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return the content of sweep.yaml, which identifies the sweep of a command."""
    return {"format": FORMAT, "words": _kept(words), "name": name, "where": os.getcwd(), "sweep": options}


def _kept(words: Sequence[str]) -> list[str]:
    return [word for word in words if word.partition("=")[0] not in {f"sweep.{key}" for key in HOW}]


def _what(identity: dict[str, Any]) -> dict[str, Any]:
    """Return what must be equal in two commands of one sweep: all but how its jobs are run."""
    return {**identity, "sweep": {key: value for key, value in identity["sweep"].items() if key not in HOW}}
