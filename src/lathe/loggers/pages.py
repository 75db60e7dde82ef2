"""A page of a run, for loggers that show or keep files."""

from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger, MLFlowLogger, WandbLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_only


@rank_zero_only
def log_page(logger: Logger, page: Path) -> None:
    """Hands W&B an HTML panel, MLflow and Comet the file; the others keep no pages, and have the run directory's path
    among what they were told of the run."""
    experiment: Any = getattr(logger, "experiment", None)
    if isinstance(logger, WandbLogger):
        import wandb

        experiment.log({f"{page.parent.name}/{page.stem}": wandb.Html(page.read_text(encoding="utf-8"), inject=False)})
    elif isinstance(logger, MLFlowLogger):
        experiment.log_artifact(logger.run_id, str(page), page.parent.name)
    elif hasattr(experiment, "log_asset"):
        experiment.log_asset(str(page), file_name=f"{page.parent.name}/{page.name}")
