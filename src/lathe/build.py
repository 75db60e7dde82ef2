"""Parts from configuration nodes, with a sentence where a node can't be built."""

import inspect
import re
from typing import Any

import hydra
from hydra.errors import InstantiationException

from lathe.config import did_you_mean
from lathe.errors import UserError
from lathe.optim.build import check_optimizer
from lathe.optim.foreign import check_scheduler


def make(node: Any, key: str, /, *args: Any, **kwargs: Any) -> Any:
    """Instantiates `node`, which stands at `key` of the configuration.

    Raises:
        UserError: the target does not exist or does not take these arguments; or what the target itself raised, if that is one.
    """
    try:
        return hydra.utils.instantiate(node, *args, **kwargs)
    except InstantiationException as error:
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, UserError):
                raise cause from error
            deepest, cause = cause, cause.__cause__
        lines = [line for line in str(error).splitlines() if line.strip()]
        where = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("full_key:")), "")
        full = ".".join(part for part in (key, where) if part)
        surplus = re.search(r"unexpected keyword argument '(\w+)'", str(deepest))
        if surplus and "_target_" in (inner := _below(node, where)):
            takes = inspect.signature(hydra.utils.get_object(inner["_target_"])).parameters
            hint = did_you_mean(surplus.group(1), takes)
            raise UserError(f"{full}.{surplus.group(1)}: {inner['_target_']} takes no such argument; {hint}") from error
        if isinstance(deepest, (TypeError, ImportError, ModuleNotFoundError, AttributeError, ValueError)) or deepest is error:
            raise UserError(f"{full} can't be built: {' '.join(str(deepest).split())}") from error
        raise


def _below(node: Any, path: str) -> Any:
    for part in filter(None, path.split(".")):
        node = node[part]
    return node


def make_task(cfg: dict[str, Any], train: bool = True) -> Any:
    """The task of a resolved configuration; without optimizer and scheduler if it is not to be trained.

    The learning rate is scaled by the batch that an optimizer step sees, so accumulated batches count.

    Raises:
        UserError: a part can't be built, or its keys can't work; what can be known without data and devices is told here.
    """
    task = make(cfg["model"], "model", _partial_=True)
    if not train:
        return call_factory(task, "model")
    options: dict[str, Any] = {}
    if cfg["optimizer"].get("batch_size") is not None:
        options["batch_size"] = cfg["data"]["batch_size"] * int(cfg["trainer"].get("accumulate_grad_batches", 1))
    optimizer = make(cfg["optimizer"], "optimizer", _partial_=True, **options)
    check_optimizer(optimizer)
    scheduler = None
    if cfg.get("scheduler"):
        scheduler = make(cfg["scheduler"], "scheduler", _partial_=True, _convert_="all")
        check_scheduler(scheduler)
    return call_factory(task, "model", optimizer=optimizer, scheduler=scheduler)


def call_factory(factory: Any, key: str, **kwargs: Any) -> Any:
    """Calls what `make` returned for a `_partial_` node.

    Raises:
        UserError: it does not take these arguments.
    """
    try:
        return factory(**kwargs)
    except TypeError as error:
        raise UserError(f"{key} can't be built: {error}") from error
