"""The data module, task, net, optimizer and scheduler of a resolved configuration."""

import inspect
from typing import Any

from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import nn

from lathe.data.base import ExactDataModule
from lathe.data.foreign import share
from lathe.errors import UserError, require, under
from lathe.nets.init import apply_init
from lathe.optim.build import check_optimizer, factory_of, try_on
from lathe.optim.plan import KEYS, check_plan, plan_of
from lathe.optim.rules import freeze
from lathe.runs.nodes import make, make_part, named, target_of
from lathe.tasks import LightningTask, Task
from lathe.tasks.checkpoint_types import check_hyper_parameters


def make_data(cfg: dict[str, Any], train: bool = False) -> Any:
    """The data module of a resolved configuration, exact on any number of devices, a user's own included.

    Raises:
        UserError: it can't be built, or is none; or, where it is to `train`, keeps hyper-parameters that no checkpoint
            may hold.
    """
    datamodule = make_part(cfg["data"], "data", LightningDataModule)
    if train:
        check_hyper_parameters(datamodule, "data")
    share(datamodule, cfg["seed"])
    task = target_of(cfg["task"])
    if isinstance(datamodule, ExactDataModule) and inspect.isclass(task) and issubclass(task, LightningTask):
        datamodule.fills_up = False
    return datamodule


def make_task(cfg: dict[str, Any], train: bool = True) -> Any:
    """The task of a resolved configuration; without optimizer and scheduler if it is not to be trained.

    The learning rate is scaled by the batch that an optimizer step sees, so accumulated batches count.

    Raises:
        UserError: a part can't be built, or its keys can't work; what can be known without data and devices is told
            here.
    """
    if not isinstance(cfg["task"].get("_target_"), str):
        raise UserError(f"task={cfg['task']!r}: expected a node whose _target_ names {named(Task)}.")
    task = make(_weighted(cfg["task"]), "task", _partial_=True)
    _check_task(task.func, cfg["task"]["_target_"])
    parts = {"net": make_net(cfg["model"])} if "net" in cfg["model"] else {}
    if "net" in parts:
        _check_steps(parts["net"], task.func, cfg["task"]["_target_"])
    if not train:
        built = _called(task, **parts)
        built.take_logits(cfg["data"], train)
        return built
    optimizer = make_optimizer(cfg) if cfg["optimizer"] else None
    scheduler = make_schedule(cfg["scheduler"]) if cfg.get("scheduler") else None
    built = _called(task, **parts, optimizer=optimizer, scheduler=scheduler)
    built.fused_optimizer = cfg["trainer"].get("fused_optimizer", False)
    built.check_training()
    if cfg.get("freeze"):
        still, of = freeze(built.net, cfg["freeze"])
        rank_zero_only(print)(f"freeze: {still:,} of {of:,} parameters stay as they are.")
    if optimizer is not None:
        with under("optimizer"):
            try_on(optimizer, built.net)
    if scheduler is not None:
        with under("scheduler"):
            check_plan(scheduler, built)
            require(
                not plan_of(scheduler).waits or cfg["trainer"].get("limit_val_batches") != 0,
                "scheduler.monitor waits for a validation, and trainer.limit_val_batches=0 leaves them out: drop one "
                "of the two.",
            )
    built.take_logits(cfg["data"], train)
    return built


def _weighted(node: Any) -> Any:
    """A task's node in which lists of weights for torch's losses, which take tensors, are made tensors."""
    if not isinstance(node, dict):
        return node
    found = {key: _weighted(value) for key, value in node.items()}
    if str(node.get("_target_")).startswith("torch.nn."):
        for key in ("weight", "pos_weight"):
            if isinstance(node.get(key), list):
                found[key] = {"_target_": "torch.tensor", "data": [float(value) for value in node[key]]}
    return found


def make_net(model: dict[str, Any]) -> nn.Module:
    """The net of `model`, with the initial weights that it names.

    Raises:
        UserError: it can't be built, or is none.
    """
    net: nn.Module = make_part(model["net"], "model.net", nn.Module)
    with under("model"):
        apply_init(net, model.get("init"))
    return net


def make_optimizer(cfg: dict[str, Any]) -> Any:
    """What makes an optimizer from a net, as the configuration's `optimizer` says.

    Raises:
        UserError: as `make`, and for options that the optimizer does not take.
    """
    options: dict[str, Any] = {}
    if cfg["optimizer"].get("batch_size") is not None:
        options["batch_size"] = cfg["data"]["batch_size"] * int(cfg["trainer"].get("accumulate_grad_batches", 1))
    optimizer = factory_of(make(cfg["optimizer"], "optimizer", _partial_=True, **options))
    with under("optimizer"):
        check_optimizer(optimizer)
    return optimizer


def make_schedule(node: dict[str, Any]) -> Any:
    """A scheduler's factory, or Lightning's mapping of it where keys beside it say when it is stepped.

    Raises:
        UserError: as `make`.
    """
    if "_target_" not in node and isinstance(node.get("scheduler"), dict):  # Lightning's form, with its own default
        inner = make(node["scheduler"], "scheduler.scheduler", _partial_=True)
        return {"interval": "epoch", **node, "scheduler": inner}
    target = target_of(node)
    takes = inspect.signature(target).parameters if callable(target) else {}
    beside = {key: value for key, value in node.items() if key in KEYS and key not in takes}
    own = {key: value for key, value in node.items() if key not in beside}
    factory = make(own, "scheduler", _partial_=True)
    return {"scheduler": factory, **beside} if beside else factory


def _check_task(kind: Any, target: str) -> None:
    if not inspect.isclass(kind) or issubclass(kind, Task):
        return  # a function may make a task
    if issubclass(kind, LightningModule):
        raise UserError(
            f"task._target_={target} is a plain LightningModule, which brings its net: model=lightning "
            f"model.net={{_target_: {target}}} runs it as it is."
        )
    if issubclass(kind, nn.Module):
        raise UserError(
            f"task._target_={target} is a net: expected a task such as lathe.tasks.ClassificationTask; the net "
            "stands in model.net."
        )
    raise UserError(f"task._target_={target}: expected {named(Task)}, got the class {kind.__name__}.")


def _check_steps(net: nn.Module, kind: Any, target: str) -> None:
    own = isinstance(net, LightningModule) and is_overridden("training_step", net)
    if own and inspect.isclass(kind) and not issubclass(kind, LightningTask):
        raise UserError(
            f"model.net: {type(net).__name__} is a LightningModule, whose steps task._target_={target} would not call: "
            f"model=lightning model.net={{_target_: {type(net).__module__}.{type(net).__name__}}} runs it as it is."
        )


def _called(factory: Any, **parts: Any) -> Task:
    task = call_factory(factory, "task", **parts)
    if not isinstance(task, Task):
        raise UserError(f"task._target_={factory.func.__name__}: expected {named(Task)}, got {named(type(task))}.")
    if not isinstance(task.net, nn.Module):
        raise UserError(f"model.net: expected {named(nn.Module)}, got {named(type(task.net))}.")
    return task


def call_factory(factory: Any, key: str, **kwargs: Any) -> Any:
    """Calls what `make` returned for a `_partial_` node.

    Raises:
        UserError: it does not take these arguments.
    """
    try:
        with under(key):
            return factory(**kwargs)
    except TypeError as error:
        raise UserError(f"{key} can't be built: {error}") from error
