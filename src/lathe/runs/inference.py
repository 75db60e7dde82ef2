"""Opens the net and the data of a run without a Trainer, and evaluates functions with its task's metrics."""

import inspect
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lathe.data.base import ExactDataModule
from lathe.data.checks import check_declared, undeclared
from lathe.errors import require
from lathe.runs.build import make_data, make_task
from lathe.runs.checkpoints import read_checkpoint, restore
from lathe.runs.instantiate import locate
from lathe.runs.rundir import open_run
from lathe.tasks import LightningTask, Task

Forward = Callable[[Tensor], Any]


def open_run_net(
    path: str | Path, key: str = "run", checkpoint: str = "best", own: bool = False
) -> tuple[Task, dict[str, Any]]:
    """Return the task of a run with the weights and structure of a checkpoint, on the CPU in eval mode, and the
    run's configuration.

    The configuration names the directory as `key`. `own` allows a user's LightningModule, which declares neither its
    inputs nor its outputs.
    """
    run = open_run(path, key)
    cfg = run.config
    cfg["paths"]["run_dir"] = str(run.path)
    task: Task = make_task(cfg, train=False)
    if not own:
        refuse_lightning_module(type(task), f"{key}={path}")
    file = run.checkpoint(checkpoint, "checkpoint")
    restore(task.net, read_checkpoint(file), str(file))
    return task.eval(), cfg


def is_lightning(cfg: dict[str, Any]) -> bool:
    """Return whether a configuration's task wraps a user's LightningModule."""
    kind = locate(cfg["task"])
    return inspect.isclass(kind) and issubclass(kind, LightningTask)


def refuse_lightning_module(kind: Any, key: str) -> None:
    """Raise UserError if `kind`, the class of a task, wraps a user's LightningModule; `key` names its run."""
    message = f"{key}: it has trained a LightningModule as it is, whose inputs are not declared. Use lathe.load."
    require(not (inspect.isclass(kind) and issubclass(kind, LightningTask)), message)


def check_input_spec(cfg: dict[str, Any], run: str | Path, key: str = "run") -> None:
    """Raise UserError unless the inputs and outputs of a run's net are known."""
    kind, where = locate(cfg["task"]), f"{key}={run}"
    refuse_lightning_module(kind, where)
    is_declared = getattr(kind, "predicts", "classes") != "values" or undeclared(cfg["data"]) is None
    message = f"{where}: its task predicts values, and here are classes of images and tokens: use scripts/evaluate.py"
    require(is_declared, f"{message}, or the net of lathe.load.")
    check_declared(cfg["data"], run)


def open_core(path: str | Path, key: str = "run") -> nn.Module:
    """Return the net of a run, or the core of its LightningModule, with the best weights, on the CPU in eval mode."""
    return open_run_net(path, key, own=True)[0].core


def open_data(cfg: dict[str, Any], task: Any = None) -> Any:
    """Return the data module, set up, which gives global batches on the CPU.

    They have passed the transfer hooks of the `task`, if one is given.
    """
    datamodule = make_data(cfg)
    datamodule.reads_for = getattr(task, "driven", task)
    datamodule.prepare_data()
    # a user's own may open each split in its stage
    for stage in ("fit",) if isinstance(datamodule, ExactDataModule) else ("fit", "validate", "test"):
        datamodule.setup(stage)
    return datamodule


@torch.no_grad()
def score(task: Task, forward: Forward, batches: Iterable[Any]) -> dict[str, float]:
    """Return the task's metrics for the outputs of `forward`; padding samples do not count.

    `forward` takes the input of a batch and returns logits, as a tensor or an array.
    """
    training = task.training
    task.eval()
    meters = None if task.meters is None else task.meters.fresh()
    total: Tensor | None = None
    for batch in batches:
        outputs = torch.as_tensor(forward(batch[0].clone()))
        loss = torch.stack(list(task.losses(outputs, batch).values())).sum()
        sums = task.reduce(outputs, batch, loss).double()
        total = sums if total is None else total + sums
        if meters is not None:
            meters.update("test", *task.scored(outputs, batch))
    task.train(training)
    assert total is not None, "no batches"
    *values, count = total.tolist()
    means = {name: value / count for name, value in zip(task.metrics, values, strict=True)}
    return {**means, **task.compute(means), **({} if meters is None else meters.take("test"))}
