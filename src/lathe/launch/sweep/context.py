"""What Hydra gives a sweeper, and how a job of it is composed and run as Hydra runs one."""

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
    """`config` is what was typed, without the keys that have several values; `task` what a job does with its own."""

    hydra: HydraContext
    task: TaskFunction
    config: DictConfig

    @property
    def loader(self) -> Any:
        """What composes configurations."""
        return self.hydra.config_loader

    def composed(self, words: Sequence[str]) -> DictConfig:
        """The configuration of a job, Hydra's own part with it."""
        found: DictConfig = self.loader.load_sweep_config(self.config, list(words))
        return found

    def words_of(self, folder: SweepDir, job: Job) -> list[str]:
        """All overrides of a job: its own, and where it belongs."""
        return [*job.overrides, f"sweep.folder={as_typed(str(folder.path))}", f"sweep.job={job.number}"]

    def run(self, folder: SweepDir, job: Job) -> Any:
        """Composes a job and runs it in this process; returns its objective."""
        setup_globals()
        config = self.composed(self.words_of(folder, job))
        with open_dict(config):
            config.hydra.job.id = config.hydra.job.num = job.number
        result = run_job(self.task, config, "hydra.sweep.dir", "hydra.sweep.subdir", self.hydra)
        return result.return_value


class SweepStopped(Stopped):
    """A signal ended the sweep, which the same command takes up again."""

    def __init__(self, name: str, folder: Path) -> None:
        super().__init__(name, None)
        self.args = (f"stopped by {name}; the same command takes the sweep up again ({folder})",)
