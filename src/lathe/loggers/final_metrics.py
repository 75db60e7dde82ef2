"""Log final metrics, pages and the best checkpoint at the end of a run."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger, MLFlowLogger, WandbLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from lathe.loggers.csv import CSVLogger

PREFIX = "result/"  # result/val/accuracy is the best epoch's, val/accuracy that of every epoch


@rank_zero_only
def log_result(logger: Logger, result: Mapping[str, Any], best: Path) -> None:
    """Log the numbers of result.json, which are those of the checkpoint `best`.

    A W&B run ends here, with `best` as an artifact if its `log_model` is set.
    """
    if isinstance(logger, CSVLogger):
        return  # the run directory has result.json
    numbers = {
        f"{PREFIX}{name}": float(value)
        for name, value in result.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool)
    }
    if isinstance(logger, WandbLogger):
        _to_wandb(logger, numbers, best)
        return
    logger.log_metrics(numbers, step=int(result["steps"]))
    if not isinstance(logger, MLFlowLogger):  # its run has already ended
        logger.finalize("success")


def _to_wandb(logger: WandbLogger, numbers: dict[str, float], best: Path) -> None:
    import wandb

    run: Any = logger.experiment
    run.summary.update(numbers)
    if getattr(logger, "ships_model", False) and best.exists():
        model = wandb.Artifact(f"{run.id}-best", type="model", metadata=numbers)
        if best.is_dir():
            model.add_dir(str(best), name=best.name)
        else:
            model.add_file(str(best), name=best.name)
        run.log_artifact(model, aliases=["best", "latest"])
    run.finish()


@rank_zero_only
def log_page(logger: Logger, page: Path) -> None:
    """Log an HTML page: a panel in W&B, a file in MLflow and Comet; other loggers keep no pages."""
    if isinstance(logger, CSVLogger):
        return
    experiment: Any = getattr(logger, "experiment", None)
    if isinstance(logger, WandbLogger):
        import wandb

        experiment.log({f"{page.parent.name}/{page.stem}": wandb.Html(page.read_text(encoding="utf-8"), inject=False)})
    elif isinstance(logger, MLFlowLogger):
        experiment.log_artifact(logger.run_id, str(page), page.parent.name)
    elif hasattr(experiment, "log_asset"):
        experiment.log_asset(str(page), file_name=f"{page.parent.name}/{page.name}")
