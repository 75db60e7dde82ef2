"""Checks of a run before training, and Lightning's own errors, both under the keys of the configuration."""

import re
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, EarlyStopping
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_helpers import is_overridden

from lathe import data
from lathe.callbacks.module_access import is_users
from lathe.config.compression_plan import methods
from lathe.config.schema import with_keys
from lathe.data.base import ExactDataModule
from lathe.errors import UserError, did_you_mean, require

COUNTS = ("parameters", "best_step", "epochs", "steps", "seed", "devices", "seconds")
LOADERS = ("train_dataloader", "val_dataloader", "test_dataloader")


def check_loaders(cfg: dict[str, Any], datamodule: LightningDataModule, module: LightningModule) -> None:
    """Raise UserError before training if a loader is missing, which Lightning notices when it needs it, or not read."""
    is_ours = isinstance(datamodule, ExactDataModule)
    owner = module if not is_ours and isinstance(datamodule, data.ModuleDataModule) else datamodule
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


def check_metric_names(cfg: dict[str, Any], task: Any, callbacks: Sequence[Callback]) -> None:
    """Compare the monitors and the objective with the metrics that the task declares and the run adds.

    A user's task or callback may log any name. Early stopping then looks for it after the first validation.
    """
    declared: list[str] = list(getattr(task, "metric_names", []))
    any_name = getattr(task, "logs_more", True) or any(map(is_users, callbacks))
    for callback in callbacks:
        if isinstance(monitor := getattr(callback, "monitor", None), str):
            key = f"callbacks.{_callback_name(cfg, callback)}.monitor={monitor}"
            known = [name for name in declared if not name.startswith("test/")]
            require(not monitor.startswith("test/"), f"{key}: the test split is evaluated after training; monitor val.")
            is_known = any_name or monitor in known
            require(is_known, f"{key}: the task reports no such metric; {did_you_mean(monitor, known)}")
            waits = isinstance(callback, EarlyStopping) and not callback._check_on_train_epoch_end
            require(
                not waits or cfg["trainer"]["limit_val_batches"] != 0,
                f"{key} is looked at after a validation, and trainer.limit_val_batches=0 leaves them out: drop one.",
            )
    objective = cfg["objective"]
    if objective is None:
        return
    needs_test = not cfg["test"] and objective.startswith("test/")
    require(not needs_test, f"objective={objective} needs the test that test=false leaves out.")
    added = [name for one in callbacks if hasattr(one, "result_names") for name in one.result_names(task)]
    known = [*declared, *COUNTS, *added]
    of_method = objective.partition("/")[0] in methods(cfg.get("compression") or {})  # its reports depend on the net
    is_known = any_name or of_method or objective in known
    require(is_known, f"objective={objective}: the run reports no such metric; {did_you_mean(objective, known)}")


@contextmanager
def explain_lightning_errors(trainer: Trainer, has_begun: Callable[[], bool]) -> Iterator[None]:
    """Raise UserError if Lightning refuses the run: before training has begun, or when it verifies a component."""
    try:
        yield
    except (RuntimeError, TypeError, ValueError, AttributeError, MisconfigurationException) as error:
        if str(error).startswith("Early stopping conditioned on metric"):
            raise UserError(f"callbacks.early_stopping: {' '.join(str(error).split())}") from error
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


def _callback_name(cfg: dict[str, Any], callback: Callback) -> str:
    """Return the key of a callback below `callbacks`, or the name of its class if it has none."""
    kind, monitor = type(callback).__name__, getattr(callback, "monitor", None)
    nodes = {name: node for name, node in cfg["callbacks"].items() if isinstance(node, dict)}
    same = [name for name, node in nodes.items() if str(node.get("_target_")).rpartition(".")[2] == kind]
    return next((name for name in same if nodes[name].get("monitor") == monitor), same[0] if same else kind)
