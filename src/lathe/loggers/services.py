"""Loggers for Comet and Aim, which Lathe neither installs nor tests in full."""

import hashlib
from pathlib import Path

from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from lathe.config.types import Name
from lathe.config.validation import validated
from lathe.errors import UserError


@validated
def comet(
    run_dir: Path,
    start_step: int,
    project: Name = "lathe",
    workspace: Name | None = None,
) -> Logger:
    """Comet, online, since Lightning's logger does not keep offline experiments.

    A resumed run continues the same experiment. The key is read from COMET_API_KEY or Comet's own file.
    """
    try:
        import comet_ml  # noqa: F401
    except ImportError as error:
        raise UserError("logger=comet needs the comet-ml package: pip install comet-ml.") from error
    from lightning.pytorch.loggers import CometLogger

    key = hashlib.sha256(run_dir.name.encode()).hexdigest()[:40]  # 32 to 50 letters and digits
    return CometLogger(
        project=project, workspace=workspace, experiment_key=key, mode="get_or_create", online=True, name=run_dir.name
    )


@validated
def aim(run_dir: Path, start_step: int, repo: Name = "logs", experiment: Name = "lathe") -> Logger:
    """Aim, in a local repository or on a server; resumed runs continue the Aim run of the same name."""
    try:
        from aim import Repo
        from aim.pytorch_lightning import AimLogger
    except ImportError as error:
        raise UserError("logger=aim needs the aim package: pip install aim.") from error

    if "://" not in repo:
        Path(repo).mkdir(parents=True, exist_ok=True)
    found = None
    if start_step and getattr(rank_zero_only, "rank", 0) == 0:
        runs = Repo(repo).query_runs(f"run.name == {run_dir.name!r}", report_mode=0).iter_runs()
        found = next((item.run.hash for item in runs), None)
    logger: Logger = AimLogger(
        repo=repo,
        experiment=experiment,
        run_name=run_dir.name,
        run_hash=found,
        system_tracking_interval=None,
        log_system_params=False,  # needs a module that setuptools has removed
        capture_terminal_logs=False,
        context_prefixes={"subset": {name: f"{name}/" for name in ("train", "val", "test")}},
    )
    return logger
