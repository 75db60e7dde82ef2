"""Builds components from configuration nodes, and names the key of one that can't be built."""

import copy
import inspect
import re
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import hydra
from hydra._internal.utils import _locate
from hydra.errors import InstantiationException
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from omegaconf import OmegaConf

from lathe.configs import SOURCE
from lathe.errors import BUILDING, ArgumentError, UserError, did_you_mean, user_location

# Constructors raise these for wrong arguments. The traceback of anything else is of use.
_EXPECTED = (
    *(TypeError, ImportError, AttributeError, ValueError, RuntimeError, MemoryError, OSError, LookupError),
    *(MisconfigurationException, InstantiationException),
)
_HYDRA_KEYS = ("_target_", "_args_", "_partial_", "_convert_", "_recursive_")


def instantiate(node: Any, key: str, /, *args: Any, **kwargs: Any) -> Any:
    """Build `node`, which is at `key` of the configuration, as Hydra's `instantiate` with `_convert_="all"` does.

    Hydra resolves each target, by its policy of what may be one. The nodes are not converted to OmegaConf and back,
    which took longer than building all components of a run. Arguments are plain lists and dicts: a component that
    stores an OmegaConf node would put it into checkpoints, which then don't open with weights_only=True.
    """
    return _build({**node, **kwargs} if kwargs else node, key, "all", True, args)


def _build(node: Any, key: str, convert: str, recursive: bool, args: tuple[Any, ...] = ()) -> Any:
    if isinstance(node, (list, tuple)):
        return _converted([_build(item, f"{key}[{i}]", convert, recursive) for i, item in enumerate(node)], convert)
    if not isinstance(node, dict):
        return node
    convert, recursive = node.get("_convert_", convert), node.get("_recursive_", recursive)
    values = {
        name: _build(value, f"{key}.{name}", convert, recursive)
        if recursive
        else _converted(copy.deepcopy(value), convert)
        for name, value in node.items()
        if name not in _HYDRA_KEYS
    }
    if "_target_" not in node:
        return _converted(values, convert)
    if not args and "_args_" in node:
        args = tuple(_build(node["_args_"], f"{key}._args_", convert, recursive))
    try:
        partial = hydra.utils.instantiate({"_target_": node["_target_"], "_partial_": True})
        if not node.get("_partial_", False):
            return partial(*args, **values)
        bound = type(partial)(partial.func, *args, **values)
        vars(bound).update(vars(partial))
        return bound
    except Exception as error:
        # without this frame, which is not where the error was raised
        explained = _explain(error.with_traceback(error.__traceback__ and error.__traceback__.tb_next), node, key)
        if explained is error:
            raise
        raise explained from error


def _converted(value: Any, convert: str) -> Any:
    """Return a list or dict as `_convert_` asks for it."""
    if convert == "none" and isinstance(value, (list, dict)):
        return OmegaConf.create(value, flags={"allow_objects": True})
    return value


def _explain(error: Exception, node: dict[str, Any], key: str) -> Exception:
    """Return the exception to raise for `error`, which building the node at `key` has raised."""
    deepest: BaseException = error
    text = str(error)
    while not isinstance(deepest, UserError) and deepest.__cause__ is not None:
        deepest = deepest.__cause__
        text = f"{text} {deepest}"
    if isinstance(deepest, UserError):
        return deepest.under(key) if isinstance(deepest, ArgumentError) else deepest
    missing = re.search(r"Error (?:locating target|loading) '([\w.]+)'", text)
    if missing and (reason := explain_missing(missing[1])):
        return UserError(f"{key} can't be built: {reason}")
    if unexpected := re.search(r"unexpected keyword argument '(\w+)'", str(deepest)):
        known = inspect.signature(hydra.utils.get_object(node["_target_"])).parameters
        hint = did_you_mean(unexpected[1], known)
        if (key, unexpected[1]) == ("data", "eval_batch_size"):  # set by the commands' batch_size
            hint = "if it came from batch_size=..., leave that out"
        return UserError(f"{key}.{unexpected[1]}: {node['_target_']} takes no such argument; {hint}")
    expected = isinstance(deepest, _EXPECTED)
    if not expected and not missing:
        error.add_note(f"{BUILDING}{key}")
        return error
    kind = "" if expected and not isinstance(deepest, LookupError) else f"{type(deepest).__name__}: "
    text = deepest.msg if isinstance(deepest, SyntaxError) else str(deepest)  # user_location has the line
    text = f"{kind}{' '.join(text.split())[:500]}{user_location(deepest)}"
    if isinstance(deepest, ModuleNotFoundError) and str(node.get("_target_")).startswith(f"{deepest.name}."):
        text += f". Put your own modules into {SOURCE or 'src'}/, or set PYTHONPATH to their folder."
    return UserError(f"{key} can't be built: {text}")


def explain_missing(path: str) -> str | None:
    """Return a message that names the module or class in which the next name of `path` is missing.

    None if no name is missing, or if the first module can't be imported.
    """
    parent, *names = path.split(".")
    try:
        owner: Any = import_module(parent)
        for number, name in enumerate(names):
            if not hasattr(owner, name) and not (hasattr(owner, "__path__") and find_spec(f"{parent}.{name}")):
                kind = "module" if inspect.ismodule(owner) else "class"
                public = [word for word in dir(owner) if not word.startswith("_")]
                hint = did_you_mean(name, public, "its file says which names it has")
                return f"the {kind} {parent} has no {'.'.join(names[number:])}; {hint}"
            parent = f"{parent}.{name}"
            owner = getattr(owner, name) if hasattr(owner, name) else import_module(parent)
    except Exception:  # a user's module may raise anything when it is imported
        return None
    return None


def locate(node: Any) -> Any:
    """Return the object that the `_target_` of a node names; None if there is none, which `instantiate` reports."""
    try:
        return _locate(node["_target_"])  # Hydra's get_object logs an error as well
    except Exception:
        return None


def instantiate_as(node: Any, key: str, kind: type, /, *args: Any, or_none: bool = False, **kwargs: Any) -> Any:
    """Build a node whose value must be a `kind`, or with `or_none` None."""
    if not isinstance(node, dict) or not isinstance(node.get("_target_"), str):
        raise UserError(f"{key}={node!r}: expected a node whose _target_ names {describe_class(kind)}.")
    expected, target = f"{key}._target_={node['_target_']}: expected {describe_class(kind)}, got", locate(node)
    if inspect.isclass(target) and not issubclass(target, kind):
        raise UserError(f"{expected} the class {target.__name__}.")
    built = instantiate(node, key, *args, **kwargs)
    if not isinstance(built, kind) and not (or_none and built is None):
        raise UserError(f"{expected} {describe_class(type(built))}.")
    return built


def describe_class(kind: type) -> str:
    """Return the name of a class with its package, such as "a torch Module"."""
    package = kind.__module__.split(".")[0]
    name = kind.__name__ if package == "builtins" else f"{package} {kind.__name__}"
    return f"{'an' if name[0] in 'aeioAEIO' else 'a'} {name}"
