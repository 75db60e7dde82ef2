"""Reports Lightning's own errors under the keys of the configuration."""

import re
import traceback
from pathlib import Path
from typing import Any

import lightning
from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden

from lathe.config.schema.trainer import with_keys
from lathe.errors import UserError, require


def check_loaders(cfg: dict[str, Any], datamodule: LightningDataModule) -> None:
    """Raise UserError before training if a data module lacks a loader, which Lightning notices when it needs it."""
    name = f"data: {type(datamodule).__name__} has no"
    require(is_overridden("train_dataloader", datamodule), f"{name} train_dataloader: write one.")
    require(
        not cfg["test"] or is_overridden("test_dataloader", datamodule),
        f"{name} test_dataloader: write one, or add test=false.",
    )


def reraise_lightning_error(error: Exception, begun: bool, trainer: Trainer) -> None:
    """Raise UserError if Lightning's own code raised `error` before training has `begun`, or to verify a component."""
    verifies = traceback.extract_tb(error.__traceback__)[-1].name.startswith("_verify_")
    if (verifies or not begun) and _is_from_lightning(error):
        message = with_keys(str(error))
        if getattr(trainer, "overfit_batches", 0):  # from which Lightning sets these limits
            message = re.sub(r"trainer\.limit_(?:train|val)_batches", "trainer.overfit_batches", message)
        raise UserError(f"Lightning refuses this run: {message}") from error


def _is_from_lightning(error: BaseException) -> bool:
    """Return whether Lightning's code raised this, and not a component that it called."""
    frames = traceback.extract_tb(error.__traceback__)
    if frames and frames[-1].name == "__getattr__":  # of a module: its caller asked for a missing attribute
        frames.pop()
    return bool(frames) and Path(frames[-1].filename).is_relative_to(Path(lightning.__file__).parent)
