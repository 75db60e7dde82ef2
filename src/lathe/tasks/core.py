"""The core of a task, which is compressed, compiled and exported: the net, or a submodule of a LightningModule."""

from collections.abc import Iterable
from itertools import islice
from typing import Any

from lightning.pytorch import LightningModule
from torch import nn

from lathe.errors import did_you_mean, require
from lathe.measure.calls import Call
from lathe.measure.flops import net_input
from lathe.tasks.base import Task

EXAMPLE = "example.pt"  # in a run directory: the core's arguments in the first batch


def find_core(module: nn.Module, name: str | None) -> str:
    """Return the name of the submodule that is the core: `name`, else the only child with parameters, else ""."""
    children = [child for child, part in module.named_children() if any(True for _ in part.parameters())]
    if name is None:
        return children[0] if len(children) == 1 else ""
    known = dict(module.named_modules())
    require(
        name in known,
        f"model.core={name}: {type(module).__name__} has no such submodule; {did_you_mean(name, children or known)}",
    )
    return name


def core_of(module: nn.Module) -> nn.Module:
    """Return the core of a task or a LightningModule, and any other net itself."""
    task = vars(module).get("lathe_task", module)
    if isinstance(task, Task):
        return task.core
    if isinstance(module, LightningModule):  # under a plain Trainer
        children = dict(module.named_children())
        return children["net"] if "net" in children else module.get_submodule(find_core(module, None))
    return module


def is_foreign(module: nn.Module) -> bool:
    """Return whether a Trainer's module is a user's LightningModule, which declares neither loss nor metrics."""
    return not isinstance(module, Task)


def core_name(module: nn.Module) -> str:
    """Return the name of `core_of(module)` in a task's net: "" for the whole of it."""
    task = vars(module).get("lathe_task")
    return task.core_name if isinstance(task, Task) else ""


def record_calls(task: nn.Module, batches: Iterable[Any], limit: int = 1, split: str = "val") -> list[Call]:
    """Return the core's arguments for the first `limit` batches, which are on the task's device.

    For Lathe's tasks these are the net's input. A LightningModule's `validation_step`, in eval mode and without
    gradients, runs on each batch until it calls the core; `training_step` does where that is missing, or with
    split="train". `self.log` and optimizers do nothing meanwhile; random states and modes are restored.
    """
    task_or_module = vars(task).get("lathe_task", task)
    if isinstance(task_or_module, Task) and task_or_module.driven is task_or_module:
        return [Call((net_input(batch),)) for batch in islice(batches, limit)]
    module: Any = getattr(task_or_module, "driven", task_or_module)
    example = getattr(task_or_module, "example", None)
    if isinstance(example, str):
        device = next((parameter.device for parameter in module.parameters()), "cpu")
        return [Call.load(example).to(device)]
    from lathe.tasks.recording import record  # for a user's own module only

    return record(module, islice(batches, limit), split)
