"""Whose hooks run: a task, or a LightningModule of the user's own that a task stands for."""

from typing import Any

from lightning.pytorch import LightningModule
from torch import nn

from lathe.measure.flops import net_input


def task_of(pl_module: nn.Module) -> Any:
    """What a run asks about the module that its Trainer drives: the task that stands for a user's own, or itself."""
    return vars(pl_module).get("lathe_task", pl_module)


def net_of(pl_module: LightningModule) -> nn.Module:
    """What is trained: a task's net; of a user's own module the whole."""
    net: nn.Module = task_of(pl_module).get_submodule("net")
    return net


def count_units(pl_module: LightningModule, batch: Any) -> int:
    """Samples or tokens of a batch, as the task counts them."""
    count = getattr(task_of(pl_module), "count_units", None)
    return int(count(batch)) if count is not None else len(net_input(batch))


def planned_batches(trainer: Any, each: int) -> int | None:
    """How many batches of training a run has, of `each` in an epoch; None where nothing says so, or in a trial of a few
    (`fast_dev_run`).
    """
    epochs, steps = trainer.max_epochs, trainer.max_steps
    ends = [] if epochs is None or epochs < 0 else [epochs * each]
    ends += [] if steps < 0 else [steps * trainer.accumulate_grad_batches]
    return None if not ends or getattr(trainer, "fast_dev_run", False) else min(ends)
