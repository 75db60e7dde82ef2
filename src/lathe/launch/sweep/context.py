"""Hydra's context of a sweeper: composes and runs a job as Hydra does."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.utils import run_job, setup_globals
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, open_dict

from lathe.config.quoting import as_typed
from lathe.errors import Stopped
from lathe.launch.sweep.place import Job, SweepDir


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
        result = run_job(self.task, config, "hydra.sweep.dir", "hydra.sweep.subdir", self.hydra)
        return result.return_value


class SweepStopped(Stopped):
    """Raised when a signal ended the sweep; the same command resumes it."""

    def __init__(self, name: str, folder: Path) -> None:
        super().__init__(name, None)
        self.args = (f"stopped by {name}; the same command takes the sweep up again ({folder})",)
