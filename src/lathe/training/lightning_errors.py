"""Reports Lightning's own errors under the keys of the configuration."""

import re
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning
from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_helpers import is_overridden

from lathe.config.schema import with_keys
from lathe.errors import UserError, require
from lathe.training.monitor_checks import unreported_monitor


def check_loaders(cfg: dict[str, Any], datamodule: LightningDataModule) -> None:
    """Raise UserError before training if a data module lacks a loader, which Lightning notices when it needs it."""
    name = f"data: {type(datamodule).__name__} has no"
    require(is_overridden("train_dataloader", datamodule), f"{name} train_dataloader: write one.")
    require(
        not cfg["test"] or is_overridden("test_dataloader", datamodule),
        f"{name} test_dataloader: write one, or add test=false.",
    )


@contextmanager
def explain_lightning_errors(
    cfg: dict[str, Any], trainer: Trainer, callbacks: Sequence[Callback], has_begun: Callable[[], bool]
) -> Iterator[None]:
    """Raise UserError if Lightning refuses the run: before training has begun, or when it verifies a component."""
    try:
        yield
    except (RuntimeError, TypeError, ValueError, AttributeError, MisconfigurationException) as error:
        if str(error).startswith("Early stopping conditioned on metric"):
            raise unreported_monitor(cfg, callbacks, str(error), trainer.callback_metrics) from error
        verifies = traceback.extract_tb(error.__traceback__)[-1].name.startswith("_verify_")
        if (has_begun() and not verifies) or not _is_from_lightning(error):
            raise
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
