"""Commands in this process up to the job, which is one of the tests' instead of training."""

from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import open_dict

from lathe.launch import launch, launch_on_run
from lathe.launch.command_checks import IGNORE_LOG_DIR
from lathe.runs.rundir import RunDir
from support.runs import ROOT, runs


class Command:
    """Runs overrides as `python train.py ...` would, in this process."""

    def __init__(self, log_dir: Path) -> None:
        self.log_dir = log_dir

    def __call__(
        self, *typed: str, job: str = "support.agent_jobs:echo", name: str = "train", mode: RunMode = RunMode.RUN
    ) -> Any:
        overrides = [*typed] if name in IGNORE_LOG_DIR else [*typed, f"paths.log_dir={self.log_dir}"]
        with initialize_config_dir(str(ROOT / "configs"), version_base="1.3", job_name="train"):
            cfg = compose(name, overrides=overrides, return_hydra_config=True)
            with open_dict(cfg):
                cfg.hydra.mode = mode
                cfg.hydra.job.config_name = name
            HydraConfig.instance().set_config(cfg)
            with open_dict(cfg):
                del cfg["hydra"]
            return launch(cfg, job) if name == "train" else launch_on_run(cfg, job)

    def fails(self, *typed: str, capsys: pytest.CaptureFixture[str], **options: Any) -> str:
        """Return the only sentence on stderr; the exit code must be 1."""
        with pytest.raises(SystemExit) as left:
            self(*typed, **options)
        assert left.value.code == 1
        error = capsys.readouterr().err
        assert error.startswith("Error: ")
        assert error.count("\n") == 1
        return error.removeprefix("Error: ").rstrip("\n")

    @property
    def runs(self) -> list[RunDir]:
        return [RunDir(path) for path in runs(self.log_dir)]
