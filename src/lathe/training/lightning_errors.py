"""Reports Lightning's own errors under the keys of the configuration."""

import re
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_helpers import is_overridden

from lathe.config.schema import with_keys
from lathe.data import ModuleDataModule
from lathe.errors import UserError, require
from lathe.training.monitor_checks import unreported_monitor

LOADERS = ("train_dataloader", "val_dataloader", "test_dataloader")


def check_loaders(cfg: dict[str, Any], datamodule: LightningDataModule, module: LightningModule) -> None:
    """Raise UserError before training if a loader is missing, which Lightning notices when it needs it, or not read."""
    owner = module if isinstance(datamodule, ModuleDataModule) else datamodule
    name = f"data: {type(owner).__name__} has no"
    require(is_overridden("train_dataloader", owner), f"{name} train_dataloader: write one.")
    require(
        not cfg["test"] or is_overridden("test_dataloader", owner),
        f"{name} test_dataloader: write one, or add test=false.",
    )
    unread = [hook for hook in LOADERS if owner is not module and is_overridden(hook, module)]
    require(
        not unread,
        f"data: {type(module).__name__}.{unread[0] if unread else ''} is not used. Add data=module, or move it to a "
        "LightningDataModule, data={_target_: mine.Data}.",
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
