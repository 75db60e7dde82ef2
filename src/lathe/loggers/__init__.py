"""Where metrics go. Each function takes the run directory and the optimizer step that the run starts at, and returns a
Lightning logger.
"""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger, TensorBoardLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from lathe.config.types import Name
from lathe.config.validation import validated
from lathe.errors import UserError
from lathe.loggers.csv import CSVLogger
from lathe.loggers.facts import LOGIN, log_facts, main_facts, run_facts
from lathe.loggers.final_metrics import log_page, log_result
from lathe.loggers.run_log import run_log
from lathe.loggers.services import aim, comet

__all__ = [
    "CSVLogger",
    "aim",
    "comet",
    "csv",
    "ended_on_error",
    "log_facts",
    "log_page",
    "log_result",
    "main_facts",
    "mlflow",
    "run_facts",
    "run_log",
    "tensorboard",
    "wandb",
]


def csv(run_dir: Path, start_step: int) -> Logger:
    """metrics.csv; lines after `start_step`, which an interrupted run left and will write again, are dropped."""
    return CSVLogger(run_dir / "metrics.csv", start_step)


def tensorboard(run_dir: Path, start_step: int) -> Logger:
    """Event files under tensorboard/; points after `start_step` are hidden, as they will be written again."""
    again = (run_dir / "tensorboard").exists()
    return TensorBoardLogger(
        str(run_dir),
        name="tensorboard",
        version="",
        purge_step=start_step + 1 if again else None,
        default_hp_metric=False,
    )


@validated
def wandb(
    run_dir: Path,
    start_step: int,
    project: Name = "lathe",
    name: Name | None = None,
    offline: bool = True,
    group: Name | None = None,
    tags: list[Name] | None = None,
    entity: Name | None = None,
    log_model: bool = False,
) -> Logger:
    """Weights & Biases, files under wandb/ in the run directory. A continued run goes on under the same id. With
    `log_model`, best.ckpt becomes an artifact of the run at its end.

    Raises:
        UserError: wandb is not installed.
    """
    try:
        import wandb as package
    except ImportError as error:
        raise UserError("logger=wandb needs the wandb package: pip install -e '.[wandb]'.") from error
    from lightning.pytorch.loggers import WandbLogger

    if package.run is not None and package.run.id != run_dir.name:
        package.finish()  # of an earlier job of a sweep in this process: the logger would go on in it
    # W&B names a part's folder by the second it begins in: one that follows within it would write over the first
    while any(run_dir.glob(f"wandb/*run-{datetime.now():%Y%m%d_%H%M%S}-*")):
        time.sleep(0.05)
    settings = package.Settings(console="off", silent=True)
    options: dict[str, Any] = {"group": group, "tags": tags, "settings": settings}
    if not offline:
        options["resume"] = "allow"
    if entity is not None:
        options["entity"] = entity
    logger = WandbLogger(
        name=name or run_dir.name, project=project, save_dir=str(run_dir), id=run_dir.name, offline=offline, **options
    )
    # Lightning's own log_model knows its ModelCheckpoint alone, and refuses to stage files offline.
    setattr(logger, "ships_model", log_model)  # noqa: B010
    return logger


@contextmanager
def ended_on_error(run_dir: Path) -> Iterator[None]:
    """Ends the W&B run that a failed run leaves open in this process, and marks it as failed: its directory may go, and
    the next run of a sweep has its own."""
    try:
        yield
    except BaseException:
        package = sys.modules.get("wandb")
        if package is not None and package.run is not None and package.run.id == run_dir.name:
            with suppress(Exception):  # the run's own error is told
                package.finish(exit_code=1)
        raise


@validated
def mlflow(
    run_dir: Path,
    start_step: int,
    experiment_name: Name = "lathe",
    tracking_uri: Name | None = None,
    run_name: Name | None = None,
) -> Logger:
    """MLflow. A continued run goes on in the MLflow run that carries its directory's name. Without a `tracking_uri`,
    MLflow's own choice holds: the variable MLFLOW_TRACKING_URI, or sqlite:///mlflow.db where the command runs.

    Raises:
        UserError: mlflow is not installed, or its address can't be used.
    """
    try:
        import mlflow as package
    except ImportError as error:
        raise UserError("logger=mlflow needs the mlflow package: pip install -e '.[mlflow]'.") from error
    from lightning.pytorch.loggers import MLFlowLogger

    # Lightning's own choice is a folder, which MLflow refuses; an earlier logger's address stays set in this process
    tracking_uri = tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or "sqlite:///mlflow.db"
    if getattr(rank_zero_only, "rank", 0) == 0:
        _check_address(tracking_uri, experiment_name)
    tag = {"lathe.run": run_dir.name}
    run_id = None
    if start_step:
        package.set_tracking_uri(tracking_uri)
        found = package.search_runs(
            experiment_names=[experiment_name],
            filter_string=f"tags.`lathe.run` = '{run_dir.name}'",
            output_format="list",
        )
        run_id = found[0].info.run_id if found else None
    return MLFlowLogger(
        experiment_name=experiment_name,
        run_name=run_name or run_dir.name,
        tracking_uri=tracking_uri,
        tags=tag,
        run_id=run_id,
    )


def _check_address(tracking_uri: str, experiment_name: str) -> None:
    """Asks MLflow once, without the minutes in which it would try again, before data and devices are ready."""
    from mlflow import MlflowClient

    retries = "MLFLOW_HTTP_REQUEST_MAX_RETRIES"
    before = os.environ.get(retries)
    os.environ[retries] = before or "1"
    try:
        MlflowClient(tracking_uri).get_experiment_by_name(experiment_name)
    except Exception as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise UserError(
            f"logger.mlflow.tracking_uri={LOGIN.sub('hidden', tracking_uri)} can't be used "
            f"({LOGIN.sub('hidden', reason)}): give a database file such as sqlite:///mlflow.db, or a server's address."
        ) from error
    finally:
        if before is None:
            del os.environ[retries]
