"""A run's place in a sweep, and overrides of `sweep` in a command that is none. Every run imports this."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, open_dict

from lathe.config.override_parsing import key_of
from lathe.errors import require


@dataclass(frozen=True)
class SweepJob:
    """A run's place in its sweep, passed to its process as `sweep.folder` and `sweep.job`."""

    folder: Path
    number: int

    @property
    def launch_id(self) -> str:
        """The launch id of the job's run, so that a restart finds the run."""
        return f"{self.folder.name}-{self.number:05}"

    def found(self, run_dir: Path) -> None:
        """Record the path of the job's run in the sweep's study, before it trains."""
        from lathe.runs.optuna_study import write_result

        write_result(self.folder, self.number, "run_dir", str(run_dir))


def check_sweep_words(typed: Sequence[str]) -> None:
    """Raise UserError if there are overrides of `sweep` in a command without -m."""
    own = next((word for word in typed if key_of(word).split(".")[0] == "sweep"), None)
    alone = own is not None and HydraConfig.get().mode != RunMode.MULTIRUN
    require(not alone, f"{own} is for a sweep: add -m (python train.py -m {own} ...).")


def job_of(cfg: DictConfig) -> SweepJob | None:
    """Return this run's place in its sweep, or None. Removes `sweep` from `cfg`: it is not part of the experiment."""
    with open_dict(cfg):
        node = cfg.pop("sweep", None)
    if node is None or node.get("job") is None:
        return None
    return SweepJob(Path(str(node.folder)), int(node.job))
