"""Where figures go. Each function takes the run directory and the optimizer step that the run starts at, and returns a Lightning logger."""

from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger, TensorBoardLogger

from lathe.errors import UserError
from lathe.loggers.csv import CSVLogger

__all__ = ["CSVLogger", "csv", "mlflow", "tensorboard", "wandb"]


def csv(run_dir: Path, start_step: int) -> Logger:
    """metrics.csv; lines after `start_step`, which an interrupted run left and will write again, are dropped."""
    return CSVLogger(run_dir / "metrics.csv", start_step)


def tensorboard(run_dir: Path, start_step: int) -> Logger:
    """Event files under tensorboard/; points after `start_step` are hidden, as they will be written again."""
    again = (run_dir / "tensorboard").exists()
    return TensorBoardLogger(str(run_dir), name="tensorboard", version="", purge_step=start_step + 1 if again else None)


def wandb(
    run_dir: Path,
    start_step: int,
    project: str = "lathe",
    name: str | None = None,
    offline: bool = True,
    group: str | None = None,
    tags: list[str] | None = None,
) -> Logger:
    """Weights & Biases, files under wandb/ in the run directory. A continued run goes on under the same id.

    Raises:
        UserError: wandb is not installed.
    """
    try:
        import wandb as package
    except ImportError as error:
        raise UserError("logger=wandb needs the wandb package: pip install -e .[wandb].") from error
    from lightning.pytorch.loggers import WandbLogger

    settings = package.Settings(console="off", silent=True)
    options: dict[str, Any] = {"group": group, "tags": tags, "settings": settings}
    if not offline:
        options["resume"] = "allow"
    return WandbLogger(
        name=name or run_dir.name, project=project, save_dir=str(run_dir), id=run_dir.name, offline=offline, **options
    )


def mlflow(
    run_dir: Path, start_step: int, experiment_name: str = "lathe", tracking_uri: str | None = None, run_name: str | None = None
) -> Logger:
    """MLflow. A continued run goes on in the MLflow run that carries its directory's name.

    Raises:
        UserError: mlflow is not installed.
    """
    try:
        import mlflow as package
    except ImportError as error:
        raise UserError("logger=mlflow needs the mlflow package: pip install -e .[mlflow].") from error
    from lightning.pytorch.loggers import MLFlowLogger

    tag = {"lathe.run": run_dir.name}
    run_id = None
    if start_step and tracking_uri is not None:
        package.set_tracking_uri(tracking_uri)
        found = package.search_runs(
            experiment_names=[experiment_name], filter_string=f"tags.`lathe.run` = '{run_dir.name}'", output_format="list"
        )
        run_id = found[0].info.run_id if found else None
    return MLFlowLogger(
        experiment_name=experiment_name, run_name=run_name or run_dir.name, tracking_uri=tracking_uri, tags=tag, run_id=run_id
    )
