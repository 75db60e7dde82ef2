"""The loggers of `configs/logger/`, and what they get next to metrics: configuration, tags, result, pages.

Each function of a logger takes the run directory and the first optimizer step, and returns Lightning's logger.
"""

import hashlib
import os
import re
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger, MLFlowLogger, TensorBoardLogger, WandbLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_only, rank_zero_warn

from lathe.config.types import Name
from lathe.config.validation import validated
from lathe.errors import UserError
from lathe.loggers.run_log import LOGIN

CHUNK = 100  # parameters in one MLflow request
PREFIX = "result/"  # result/val/accuracy is the best epoch's, val/accuracy that of every epoch


def tensorboard(run_dir: Path, start_step: int) -> Logger:
    """Event files under tensorboard/; points after `start_step`, which will be repeated, are hidden."""
    resumes = (run_dir / "tensorboard").exists()
    return TensorBoardLogger(
        str(run_dir),
        name="tensorboard",
        version="",
        purge_step=start_step + 1 if resumes else None,
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
    if package.run is not None and package.run.id != run_dir.name:
        package.finish()  # an earlier job of a sweep in this process, which the logger would continue
    # W&B names folders by the second: another one within the same second would overwrite the first
    while any(run_dir.glob(f"wandb/*run-{datetime.now():%Y%m%d_%H%M%S}-*")):
        time.sleep(0.05)
    logger = WandbLogger(
        name=name or run_dir.name,
        project=project,
        save_dir=str(run_dir),
        id=run_dir.name,
        offline=offline,
        group=group,
        tags=tags,
        entity=entity,
        settings=package.Settings(console="off", silent=True),
    )
    # Lightning's log_model supports only its ModelCheckpoint, and not offline.
    setattr(logger, "ships_model", log_model)  # noqa: B010
    return logger


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
    # Lightning's default is a folder, which MLflow rejects; an earlier logger's address stays set in this process
    tracking_uri = tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or "sqlite:///mlflow.db"
    if getattr(rank_zero_only, "rank", 0) == 0:
        _check_address(tracking_uri, experiment_name)
    run_id = None
    if start_step:
        package.set_tracking_uri(tracking_uri)
        runs = package.search_runs(
            experiment_names=[experiment_name],
            filter_string=f"tags.`lathe.run` = '{run_dir.name}'",
            output_format="list",
        )
        run_id = runs[0].info.run_id if runs else None
    return MLFlowLogger(
        experiment_name=experiment_name,
        run_name=run_name or run_dir.name,
        tracking_uri=tracking_uri,
        tags={"lathe.run": run_dir.name},
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


@rank_zero_only
def log_facts(
    logger: Logger,
    facts: Mapping[str, Any],
    main: Mapping[str, Any],
    tags: Sequence[str],
    start_step: int,
    metric: str | None,
) -> None:
    """Log the `main` facts first, then all `facts`, once per run.

    They are nested under `config`, flat parameters in MLflow, and omitted in TensorBoard. A resumed run, which starts
    at `start_step`, logs nothing twice. `metric` is the one in TensorBoard's table of runs.
    """
    if isinstance(logger, MLFlowLogger):
        _to_mlflow(logger, {**main, **facts}, tags)
    elif isinstance(logger, TensorBoardLogger):
        if start_step == 0:  # a resumed run's files have them already
            from torch.utils.tensorboard.summary import hparams

            plain = {
                key: value if isinstance(value, (bool, int, float, str)) else str(value) for key, value in main.items()
            }
            for summary in hparams(plain, dict.fromkeys(filter(None, (metric, "result/objective")), 0.0)):
                logger.experiment._get_file_writer().add_summary(summary)
    else:
        logger.log_hyperparams({**main, "config": dict(facts)})
        if isinstance(logger, WandbLogger) and tags:
            experiment: Any = logger.experiment
            experiment.tags = tuple(dict.fromkeys((*(experiment.tags or ()), *tags)))


def _to_mlflow(logger: MLFlowLogger, facts: Mapping[str, Any], tags: Sequence[str]) -> None:
    """Log to MLflow, which never changes a parameter: values that a resumed run has changed become tags."""
    from mlflow.entities import Param
    from mlflow.utils.validation import MAX_PARAM_VAL_LENGTH, MAX_TAG_VAL_LENGTH

    client: Any = logger.experiment
    logged = client.get_run(logger.run_id).data.params
    params = {re.sub(r"[^\w\-. /]", "_", key): str(value) for key, value in facts.items()}
    long = [key for key, value in params.items() if len(value) > MAX_PARAM_VAL_LENGTH]
    if long:
        rank_zero_warn(
            f"logger=mlflow: {', '.join(long)} cut at {MAX_PARAM_VAL_LENGTH} characters, all that MLflow takes; "
            "config.yaml has the rest."
        )
    params = {key: value[:MAX_PARAM_VAL_LENGTH] for key, value in params.items()}
    fresh = [Param(key, value) for key, value in params.items() if key not in logged]
    for start in range(0, len(fresh), CHUNK):
        client.log_batch(run_id=logger.run_id, params=fresh[start : start + CHUNK])
    for key, value in params.items():
        if logged.get(key, value) != value:
            client.set_tag(logger.run_id, f"changed.{key}"[:250], value[:MAX_TAG_VAL_LENGTH])
    if tags:
        client.set_tag(logger.run_id, "tags", ",".join(tags)[:MAX_TAG_VAL_LENGTH])


@rank_zero_only
def log_result(logger: Logger, result: Mapping[str, Any], best: Path) -> None:
    """Log the numbers of result.json, which are those of the checkpoint `best`.

    A W&B run ends here, with `best` as an artifact if its `log_model` is set.
    """
    numbers = {
        f"{PREFIX}{name}": float(value)
        for name, value in result.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool)
    }
    if isinstance(logger, WandbLogger):
        import wandb

        run: Any = logger.experiment
        run.summary.update(numbers)
        if getattr(logger, "ships_model", False) and best.exists():
            model = wandb.Artifact(f"{run.id}-best", type="model", metadata=numbers)
            (model.add_dir if best.is_dir() else model.add_file)(str(best), name=best.name)
            run.log_artifact(model, aliases=["best", "latest"])
        run.finish()
        return
    logger.log_metrics(numbers, step=int(result["steps"]))
    if not isinstance(logger, MLFlowLogger):  # its run has already ended
        logger.finalize("success")


@rank_zero_only
def log_page(logger: Logger, page: Path) -> None:
    """Log an HTML page: a panel in W&B, a file in MLflow and Comet; other loggers keep no pages."""
    experiment: Any = getattr(logger, "experiment", None)
    if isinstance(logger, WandbLogger):
        import wandb

        experiment.log({f"{page.parent.name}/{page.stem}": wandb.Html(page.read_text(encoding="utf-8"), inject=False)})
    elif isinstance(logger, MLFlowLogger):
        experiment.log_artifact(logger.run_id, str(page), page.parent.name)
    elif hasattr(experiment, "log_asset"):
        experiment.log_asset(str(page), file_name=f"{page.parent.name}/{page.name}")
