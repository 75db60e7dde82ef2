"""Builds the data module, task, net, optimizer and scheduler of a resolved configuration."""

import inspect
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from types import ModuleType
from typing import Any

from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import nn

from lathe.data.base import ExactDataModule
from lathe.errors import UserError, require, under
from lathe.optim.build import factory_of, freeze, try_on
from lathe.runs.instantiate import describe_class, instantiate, instantiate_as, locate
from lathe.tasks import Task
from lathe.tasks.checkpoint_types import print_left_out
from lathe.tasks.scheduler import KEYS, check_plan, plan_of

OLD, NEW = "pytorch_lightning", "lightning.pytorch"  # names of one package


def make_data(cfg: dict[str, Any], train: bool = False) -> Any:
    """Build the data module, with batches that don't depend on the number of devices, also for a user's own."""
    alias_pytorch_lightning()
    datamodule = instantiate_as(cfg["data"], "data", LightningDataModule)
    if train:
        print_left_out(datamodule, "data")
    if isinstance(datamodule, ExactDataModule):
        if getattr(locate(cfg["task"]), "brings_module", False):
            datamodule.fills_up = False
    else:
        from lathe.data.external import share  # our own data modules have exact loaders

        share(datamodule, cfg["seed"], own=cfg["trainer"].get("use_distributed_sampler", False))
    return datamodule


def make_task(cfg: dict[str, Any], train: bool = True) -> Any:
    """Build the task with its net; with optimizer and scheduler if it is to `train`."""
    alias_pytorch_lightning()
    if not isinstance(cfg["task"].get("_target_"), str):
        raise UserError(f"task={cfg['task']!r}: expected a node whose _target_ names {describe_class(Task)}.")
    factory = instantiate(_with_weight_tensors(cfg["task"]), "task", _partial_=True)
    _check_task_class(factory.func, cfg["task"]["_target_"])
    parts: dict[str, Any] = {}
    if "net" in cfg["model"]:
        parts["net"] = net = make_net(cfg["model"])
        if isinstance(net, LightningModule) and is_overridden("training_step", net) and inspect.isclass(factory.func):
            require(
                getattr(factory.func, "brings_module", False),
                f"model.net: {type(net).__name__} is a LightningModule, whose steps task._target_="
                f"{cfg['task']['_target_']} would not call: model=lightning "
                f"model.net={{_target_: {type(net).__module__}.{type(net).__name__}}} runs it as it is.",
            )
    if getattr(factory.func, "brings_module", False):
        parts |= {key: cfg["model"].get(key) for key in ("core", "example")}
    if train:
        parts["optimizer"] = make_optimizer(cfg) if cfg["optimizer"] else None
        parts["scheduler"] = make_schedule(cfg["scheduler"]) if cfg.get("scheduler") else None
    try:
        with under("task"):
            task = factory(**parts)
    except TypeError as error:
        raise UserError(f"task can't be built: {error}") from error
    if not isinstance(task, Task):
        got = describe_class(type(task))
        raise UserError(f"task._target_={factory.func.__name__}: expected {describe_class(Task)}, got {got}.")
    if not isinstance(task.net, nn.Module):
        raise UserError(f"model.net: expected {describe_class(nn.Module)}, got {describe_class(type(task.net))}.")
    if train:
        _prepare_training(cfg, task, parts["optimizer"], parts["scheduler"])
    task.take_logits(cfg["data"], train)
    return task


def _prepare_training(cfg: dict[str, Any], task: Task, optimizer: Any, scheduler: Any) -> None:
    """Freeze parameters, and try optimizer and scheduler on the net."""
    task.fused_optimizer = cfg["trainer"].get("fused_optimizer", False)
    task.check_training()
    if cfg.get("freeze"):
        frozen, total = freeze(task.net, cfg["freeze"])
        rank_zero_only(print)(f"freeze: {frozen:,} of {total:,} parameters stay as they are.")
    if optimizer is not None:
        with under("optimizer"):
            try_on(optimizer, task.net)
    if scheduler is not None:
        with under("scheduler"):
            check_plan(scheduler, task)
            is_validated = cfg["trainer"].get("limit_val_batches") != 0
            message = "scheduler.monitor waits for a validation, and trainer.limit_val_batches=0 leaves them out."
            require(not plan_of(scheduler).waits or is_validated, message)


def _with_weight_tensors(node: Any) -> Any:
    """Return a task's node with tensors for lists of class weights, since torch's losses take no lists."""
    if not isinstance(node, dict):
        return node
    converted = {key: _with_weight_tensors(value) for key, value in node.items()}
    if str(node.get("_target_")).startswith("torch.nn."):
        for key in ("weight", "pos_weight"):
            if isinstance(node.get(key), list):
                converted[key] = {"_target_": "torch.tensor", "data": [float(value) for value in node[key]]}
    return converted


def make_net(model: dict[str, Any]) -> nn.Module:
    """Build the net of the group `model`, with the initial weights of `model.init`."""
    net: nn.Module = instantiate_as(model["net"], "model.net", nn.Module)
    if model.get("init") is not None:
        from lathe.nets.init import apply_init

        with under("model"):
            apply_init(net, model["init"])
    return net


def make_optimizer(cfg: dict[str, Any]) -> Any:
    """Return a function that builds the optimizer for a net.

    An optimizer whose `batch_size` follows the data's gets that of a step, including accumulated batches.
    """
    options: dict[str, Any] = {}
    size = cfg["optimizer"].get("batch_size")
    if size is not None and size == cfg["data"].get("batch_size"):
        options["batch_size"] = size * int(cfg["trainer"].get("accumulate_grad_batches", 1))
    return factory_of(instantiate(cfg["optimizer"], "optimizer", _partial_=True, **options))


def make_schedule(node: dict[str, Any]) -> Any:
    """Return the scheduler's factory, or Lightning's dict of it if the node says when to step it."""
    if "_target_" not in node and isinstance(node.get("scheduler"), dict):  # Lightning's form, with its own default
        inner = instantiate(node["scheduler"], "scheduler.scheduler", _partial_=True)
        return {"interval": "epoch", **node, "scheduler": inner}
    target = locate(node)
    parameters = inspect.signature(target).parameters if callable(target) else {}
    plan = {key: value for key, value in node.items() if key in KEYS and key not in parameters}
    own = {key: value for key, value in node.items() if key not in plan}
    factory = instantiate(own, "scheduler", _partial_=True)
    return {"scheduler": factory, **plan} if plan else factory


def _check_task_class(kind: Any, target: str) -> None:
    if not inspect.isclass(kind) or issubclass(kind, Task):  # a function may build a task
        return
    node = f"model.net={{_target_: {target}}}"
    message = f"task._target_={target} is a plain LightningModule: model=lightning {node} runs it as it is."
    require(not issubclass(kind, LightningModule), message)
    require(not issubclass(kind, nn.Module), f"task._target_={target} is a net: expected a task. Use {node}.")
    raise UserError(f"task._target_={target}: expected {describe_class(Task)}, got the class {kind.__name__}.")


class _Alias(MetaPathFinder, Loader):
    """Finds each module of `pytorch_lightning` as the one of the same name in `lightning.pytorch`."""

    def __init__(self) -> None:
        self._specs: dict[str, ModuleSpec | None] = {}

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
        if name.partition(".")[0] != OLD:
            return None
        if name == OLD:
            rank_zero_only(print)(f"{OLD} is imported as {NEW}: the classes of both would not fit.", flush=True)
        return spec_from_loader(name, self)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = import_module(NEW + spec.name.removeprefix(OLD))
        self._specs[module.__name__] = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._specs[module.__name__]  # which the import has replaced


def alias_pytorch_lightning() -> None:
    """Let later imports of `pytorch_lightning` give `lightning.pytorch`, unless it has been imported already."""
    if OLD not in sys.modules and not any(isinstance(finder, _Alias) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Alias())
