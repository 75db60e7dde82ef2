"""For callbacks: the task, net and batch size of the module that a Trainer trains, and whose a callback is."""

from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import Callback
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


def on_any_rank(trainer: Any, flag: bool) -> bool:
    """Return whether `flag` is True on any rank: a strategy's own reduce may cover only some of them. A collective."""
    if trainer.world_size == 1:
        return flag
    shared = torch.tensor(float(flag), device=trainer.strategy.root_device)
    torch.distributed.all_reduce(shared, torch.distributed.ReduceOp.MAX)
    return bool(shared.item())


def planned_batches(trainer: Any, each: int) -> int | None:
    """Count a run's training batches, `each` per epoch; None without a limit, or under `fast_dev_run`."""
    epochs, steps = trainer.max_epochs, trainer.max_steps
    ends = [] if epochs is None or epochs < 0 else [epochs * each]
    ends += [] if steps < 0 else [steps * trainer.accumulate_grad_batches]
    return None if not ends or getattr(trainer, "fast_dev_run", False) else min(ends)


def is_users(callback: Callback, *packages: str) -> bool:
    """Return whether the callback's class is in none of `packages`, by default Lathe and Lightning."""
    return type(callback).__module__.partition(".")[0] not in (packages or ("lathe", "lightning"))


def is_based_on_lathe(callback: Callback) -> bool:
    """Return whether the callback's class is Lathe's or derives from one of Lathe's."""
    return any(kind.__module__.partition(".")[0] == "lathe" for kind in type(callback).__mro__)
