"""Parts from configuration nodes, with a sentence where a node can't be built."""

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

from lathe.errors import BUILDING, ArgumentError, UserError, did_you_mean, user_location
from lathe.trust.user_packages import source_folder

# What a part that can't be made with its arguments may raise.
_RAISED = (
    *(TypeError, ImportError, AttributeError, ValueError, RuntimeError, MemoryError, OSError, LookupError),
    MisconfigurationException,
)
_RESOLVED: dict[str, Any] = {}  # by name: Hydra makes one in a third of a millisecond, and a run has some twenty parts
_WORDS = ("_target_", "_args_", "_partial_", "_convert_", "_recursive_")


def make(node: Any, key: str, /, *args: Any, **kwargs: Any) -> Any:
    """What Hydra's `instantiate` makes of `node`, which stands at `key` of the configuration, with plain lists and
    dicts as its arguments.

    Hydra resolves and calls each target, by its own policy of what may be one. Its way through the values of a node,
    which makes each of them a node of OmegaConf's, copies and merges it, took longer than all parts of a run do to be
    built. Its lists and dicts would also make groups of keys of parts that are dataclasses, and a part that keeps one,
    as save_hyperparameters does, would put it into checkpoints, which could then not be read without running code.

    Raises:
        UserError: the target does not exist or does not take these arguments; or what the target itself raised, if that
            is one.
    """
    return _made({**node, **kwargs} if kwargs else node, key, "all", True, args)


def _made(node: Any, key: str, convert: str, recursive: bool, args: tuple[Any, ...] = ()) -> Any:
    if isinstance(node, (list, tuple)):
        return _contained([_made(item, f"{key}[{at}]", convert, recursive) for at, item in enumerate(node)], convert)
    if not isinstance(node, dict):
        return node
    convert, recursive = node.get("_convert_", convert), node.get("_recursive_", recursive)
    values = {
        name: _made(value, f"{key}.{name}", convert, recursive)
        if recursive
        else _contained(copy.deepcopy(value), convert)
        for name, value in node.items()
        if name not in _WORDS
    }
    if "_target_" not in node:
        return _contained(values, convert)
    if not args and "_args_" in node:
        args = tuple(_made(node["_args_"], f"{key}._args_", convert, recursive))
    try:
        made = _resolved(node["_target_"])
        if not node.get("_partial_", False):
            return made(*args, **values)
        deferred = type(made)(made.func, *args, **values)
        vars(deferred).update(vars(made))
        return deferred
    except Exception as error:
        # without this place in Lathe's own code, which would be told as where it was raised
        told = _told(error.with_traceback(error.__traceback__ and error.__traceback__.tb_next), node, key)
        if told is error:
            raise
        raise told from error


def _resolved(name: Any) -> Any:
    """Hydra's partial of the target that `name` names."""
    known = _RESOLVED.get(name) if isinstance(name, str) else None
    if known is None or known.func is not target_of({"_target_": name}):  # which a notebook may have defined anew
        known = hydra.utils.instantiate({"_target_": name, "_partial_": True})
        if isinstance(name, str):
            _RESOLVED[name] = known
    return known


def _contained(value: Any, convert: str) -> Any:
    """A list or dict as `_convert_` asks for it."""
    if convert == "none" and isinstance(value, (list, dict)):
        return OmegaConf.create(value, flags={"allow_objects": True})
    return value


def _told(error: Exception, node: dict[str, Any], key: str) -> Exception:
    """What is raised in place of what a target raised."""
    cause: BaseException | None = error
    deepest: BaseException = error
    said = ""
    while cause is not None:
        if isinstance(cause, UserError) and not isinstance(cause, ArgumentError):
            return cause
        # an ArgumentError has put the words of those that it comes of into the caller's terms
        deepest, said = cause, f"{said} {cause}"
        cause = None if isinstance(cause, ArgumentError) else cause.__cause__
    if isinstance(deepest, ArgumentError):
        return deepest.under(key)
    unfound = re.search(r"Error (?:locating target|loading) '([\w.]+)'", said)
    absent = missing_name(unfound.group(1)) if unfound else None
    if absent:
        return UserError(f"{key} can't be built: {absent}")
    surplus = re.search(r"unexpected keyword argument '(\w+)'", str(deepest))
    if surplus:
        takes = inspect.signature(hydra.utils.get_object(node["_target_"])).parameters
        hint = did_you_mean(surplus.group(1), takes)
        if (key, surplus.group(1)) == ("data", "eval_batch_size"):  # as the verbs' batch_size sets it
            hint = "if it came from batch_size=..., leave that out"
        return UserError(f"{key}.{surplus.group(1)}: {node['_target_']} takes no such argument; {hint}")
    known = isinstance(deepest, (*_RAISED, InstantiationException))
    if known or unfound:  # a user's module may raise anything when it is imported
        raised = "" if known and not isinstance(deepest, LookupError) else f"{type(deepest).__name__}: "
        text = deepest.msg if isinstance(deepest, SyntaxError) else str(deepest)  # user_location names its line
        said = f"{raised}{' '.join(text.split())[:500]}{user_location(deepest)}"
        if isinstance(deepest, ModuleNotFoundError) and str(node.get("_target_")).startswith(f"{deepest.name}."):
            said += f": a module of your own lies in {source_folder() or 'src'}/, or PYTHONPATH names its folder"
        return UserError(f"{key} can't be built: {said}")
    error.add_note(f"{BUILDING}{key}")
    return error


def missing_name(path: str) -> str | None:
    """The sentence that says which module or class on the way to `path` lacks the next name; None if none does, or the
    first can't be imported."""
    home, *names = path.split(".")
    try:
        inside: Any = import_module(home)
        for number, name in enumerate(names):
            if not hasattr(inside, name) and not (hasattr(inside, "__path__") and find_spec(f"{home}.{name}")):
                kind = "module" if inspect.ismodule(inside) else "class"
                public = [word for word in dir(inside) if not word.startswith("_")]
                hint = did_you_mean(name, public, "its file says which names it has")
                return f"the {kind} {home} has no {'.'.join(names[number:])}; {hint}"
            home = f"{home}.{name}"
            inside = getattr(inside, name) if hasattr(inside, name) else import_module(home)
    except Exception:  # what a user's module raises when it is imported
        return None
    return None


def target_of(node: Any) -> Any:
    """What the `_target_` of a node names; None where there is none, which `make` tells."""
    try:
        return _locate(node["_target_"])  # Hydra's get_object, without its lines about what is not there
    except Exception:
        return None


def make_part(node: Any, key: str, kind: type, /, *args: Any, or_none: bool = False, **kwargs: Any) -> Any:
    """`make` where a `kind` is expected, or with `or_none` a function that may have nothing to give.

    Raises:
        UserError: as `make`, and for a part of another kind.
    """
    if not isinstance(node, dict) or not isinstance(node.get("_target_"), str):
        raise UserError(f"{key}={node!r}: expected a node whose _target_ names {named(kind)}.")
    target = target_of(node)
    if inspect.isclass(target) and not issubclass(target, kind):
        raise UserError(f"{key}._target_={node['_target_']}: expected {named(kind)}, got the class {target.__name__}.")
    part = make(node, key, *args, **kwargs)
    if not isinstance(part, kind) and not (or_none and part is None):
        raise UserError(f"{key}._target_={node['_target_']}: expected {named(kind)}, got {named(type(part))}.")
    return part


def named(kind: type) -> str:
    """A class in words, with the package that it comes from: a torch Module."""
    home = kind.__module__.split(".")[0]
    name = kind.__name__ if home == "builtins" else f"{home} {kind.__name__}"
    return f"{'an' if name[0] in 'aeioAEIO' else 'a'} {name}"
