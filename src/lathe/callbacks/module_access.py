"""Access to the task, net and batch size of the module that a Trainer trains."""

from typing import Any

from lightning.pytorch import LightningModule
from torch import nn

from lathe.measure.flops import net_input


def task_of(pl_module: nn.Module) -> Any:
    """Return the task that wraps a user's LightningModule, or the module itself."""
    return vars(pl_module).get("lathe_task", pl_module)


def net_of(pl_module: LightningModule) -> nn.Module:
    """Return the trained net: the task's, or the whole of a user's LightningModule."""
    net: nn.Module = task_of(pl_module).get_submodule("net")
    return net


def count_units(pl_module: LightningModule, batch: Any) -> int:
    """Count the samples or tokens of a batch as the task does."""
    count = getattr(task_of(pl_module), "count_units", None)
    return int(count(batch)) if count is not None else len(net_input(batch))


def planned_batches(trainer: Any, each: int) -> int | None:
    """Count a run's training batches, `each` per epoch; None without a limit, or under `fast_dev_run`."""
    epochs, steps = trainer.max_epochs, trainer.max_steps
    ends = [] if epochs is None or epochs < 0 else [epochs * each]
    ends += [] if steps < 0 else [steps * trainer.accumulate_grad_batches]
    return None if not ends or getattr(trainer, "fast_dev_run", False) else min(ends)
