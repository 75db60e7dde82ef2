"""The end of a run, for loggers: its final metrics, and its best checkpoint where that is wanted."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger, MLFlowLogger, WandbLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from lathe.loggers.csv import CSVLogger

PREFIX = "result/"  # beside val/accuracy of every epoch, that of the best one is result/val/accuracy


@rank_zero_only
def log_result(logger: Logger, result: Mapping[str, Any], best: Path) -> None:
    """Hands a logger the numbers of result.json, which hold for the checkpoint `best`. A W&B run ends here, with the
    checkpoint as an artifact if its `log_model` says so."""
    if isinstance(logger, CSVLogger):
        return  # result.json lies beside it
    numbers = {
        f"{PREFIX}{name}": float(value)
        for name, value in result.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool)
    }
    if isinstance(logger, WandbLogger):
        _to_wandb(logger, numbers, best)
        return
    logger.log_metrics(numbers, step=int(result["steps"]))
    if not isinstance(logger, MLFlowLogger):  # its run has its end already, and a second one would be later
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
