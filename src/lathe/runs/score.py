"""A run's net in hand, and the metrics of anything that computes what it does: for verbs that need no Trainer."""

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
from lathe.runs.nodes import target_of
from lathe.runs.rundir import open_run
from lathe.tasks import LightningTask, Task

Forward = Callable[[Tensor], Any]


def open_run_net(
    path: str | Path, key: str = "run", checkpoint: str = "best", own: bool = False
) -> tuple[Task, dict[str, Any]]:
    """The task of a run directory with the weights and structure of a checkpoint, on the CPU in eval mode, and its
    configuration.

    `key` is the configuration key that named the directory. `own` also opens a LightningModule of the user's own, which
    says neither what it takes nor what it answers.

    Raises:
        UserError: it is no run directory, or has no such checkpoint, or is not what is opened here.
    """
    run = open_run(path, key)
    cfg = run.config
    cfg["paths"]["run_dir"] = str(run.path)
    task: Task = make_task(cfg, train=False)
    if not own:
        refuse_own(type(task), f"{key}={path}")
    file = run.checkpoint(checkpoint, "checkpoint")
    restore(task.net, read_checkpoint(file), str(file))
    return task.eval(), cfg


def refuse_own(kind: Any, key: str) -> None:
    """Raises UserError where `kind`, the class of a task, stands for a LightningModule of the user's own; `key` names
    its run.
    """
    require(
        not (inspect.isclass(kind) and issubclass(kind, LightningTask)),
        f"{key}: it has trained a LightningModule as it is, and nobody knows what that takes and answers: use "
        "scripts/evaluate.py, or lathe.load in Python; written as a task (docs/own_parts.md) it can do this too.",
    )


def check_taken(cfg: dict[str, Any], run: str | Path, key: str = "run") -> None:
    """Raises UserError where nobody knows what the net of the `run` that `key` names takes and answers: what can't be
    mended before what can."""
    kind, where = target_of(cfg["task"]), f"{key}={run}"
    refuse_own(kind, where)
    require(
        getattr(kind, "predicts", "classes") != "values" or undeclared(cfg["data"]) is None,
        f"{where}: its task predicts values, and what is exported, served and predicted with here are classes of "
        "images and tokens: use scripts/evaluate.py, or the net of lathe.load in Python.",
    )
    check_declared(cfg["data"], run)


def open_net(path: str | Path, key: str = "run") -> nn.Module:
    """The net alone of `open_run_net`."""
    return open_run_net(path, key)[0].net


def open_data(cfg: dict[str, Any], task: Any = None) -> Any:
    """The data module of a resolved configuration, set up and without a trainer: batches are global ones, on the
    CPU, after the transfer hooks of the task as well where one is given.
    """
    datamodule = make_data(cfg)
    datamodule.reads_for = getattr(task, "driven", task)
    datamodule.prepare_data()
    # a user's own may open each split in its stage
    for stage in ("fit",) if isinstance(datamodule, ExactDataModule) else ("fit", "validate", "test"):
        datamodule.setup(stage)
    return datamodule


@torch.no_grad()
def outputs_of(forward: Forward, batches: Iterable[Any]) -> Tensor:
    """What `forward` answers to the inputs of all batches, one behind the other along the first dimension, in float32
    or wider.
    """
    found = [torch.as_tensor(forward(batch[0].clone())) for batch in batches]  # a net may write into its input
    return torch.cat([part.to(torch.promote_types(part.dtype, torch.float32)) for part in found])


@torch.no_grad()
def score(task: Task, forward: Forward, batches: Iterable[Any]) -> dict[str, float]:
    """The task's metrics, such as loss and accuracy, for the outputs of `forward`; samples that only fill up do not
    count.

    `forward` takes a batch's input and returns logits, as a tensor or an array.
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
