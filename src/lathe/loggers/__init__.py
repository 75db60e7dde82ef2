"""Loggers: each function takes the run directory and the first optimizer step, and returns a logger."""

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
from lathe.loggers.services import comet

__all__ = [
    "CSVLogger",
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
    """metrics.csv, without the lines after `start_step` of an interrupted run, which will be repeated."""
    return CSVLogger(run_dir / "metrics.csv", start_step)


def tensorboard(run_dir: Path, start_step: int) -> Logger:
    """Event files under tensorboard/; points after `start_step`, which will be repeated, are hidden."""
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
    """Weights & Biases, with files under wandb/ in the run directory.

    A resumed run continues under the same id. With `log_model`, best.ckpt becomes an artifact at the end of the run.
    """
    try:
        import wandb as package
    except ImportError as error:
        raise UserError("logger=wandb needs the wandb package: pip install -e '.[wandb]'.") from error
    from lightning.pytorch.loggers import WandbLogger

    if package.run is not None and package.run.id != run_dir.name:
        package.finish()  # an earlier job of a sweep in this process, which the logger would continue
    # W&B names folders by the second: another one within the same second would overwrite the first
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
    # Lightning's log_model supports only its ModelCheckpoint, and not offline.
    setattr(logger, "ships_model", log_model)  # noqa: B010
    return logger


@contextmanager
def ended_on_error(run_dir: Path) -> Iterator[None]:
    """End the W&B run that a failed run leaves open in this process, and mark it as failed."""
    try:
        yield
    except BaseException:
        package = sys.modules.get("wandb")
        if package is not None and package.run is not None and package.run.id == run_dir.name:
            with suppress(Exception):  # the run's own error is raised
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
    """MLflow; a resumed run continues the MLflow run that is tagged with its directory's name.

    `tracking_uri` defaults to MLFLOW_TRACKING_URI, else sqlite:///mlflow.db in the working directory.
    """
    try:
        import mlflow as package
    except ImportError as error:
        raise UserError("logger=mlflow needs the mlflow package: pip install -e '.[mlflow]'.") from error
    from lightning.pytorch.loggers import MLFlowLogger

    # Lightning's default is a folder, which MLflow rejects; an earlier logger's address stays set in this process
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
    """Query MLflow once, without its minutes of retries, before data and devices are ready."""
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
