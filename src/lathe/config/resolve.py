"""Resolved configurations: plain nested dicts, what differs between two, and the paths in them. Imports no torch."""

import copy
import glob
import os
import re
from collections.abc import Sequence
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.basecontainer import BaseContainer
from omegaconf.errors import OmegaConfBaseException

from lathe.errors import UserError, require


def _class_names(folder: Any, train: Any = None) -> list[str]:
    from lathe.config.class_names import class_names  # of image folders only

    return class_names(folder, train)


# For files of the group data: the classes of a folder, and their number.
OmegaConf.register_new_resolver("lathe.class_names", _class_names, replace=True)
OmegaConf.register_new_resolver("lathe.count", lambda names: None if names is None else len(names), replace=True)
_OUR_RESOLVER = "UserError raised while resolving interpolation: "


def flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Return the leaves of nested dicts by dotted path. A list counts as one leaf."""
    if not isinstance(tree, dict) or not tree:
        return {prefix: tree}
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        leaves.update(flatten(value, f"{prefix}.{key}" if prefix else str(key)))
    return leaves


def resolve(cfg: DictConfig) -> dict[str, Any]:
    """Return the configuration as plain nested dicts and lists, with every interpolation resolved.

    Raises UserError with a message for each interpolation that leads nowhere and each missing value (`???`).
    """
    try:
        container = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise UserError(*(_unresolved(cfg) or [_message(error)])) from error
    assert isinstance(container, dict)
    return {str(key): value for key, value in container.items()}


def _unresolved(cfg: DictConfig) -> list[str]:
    messages: dict[str, str] = {}
    for key, value in flatten(OmegaConf.to_container(cfg)).items():
        if value != "???" and "${" not in str(value):
            continue
        try:
            node = OmegaConf.select(cfg, key, throw_on_missing=True)
            if OmegaConf.is_config(node):
                OmegaConf.to_container(node, resolve=True, throw_on_missing=True)
        except OmegaConfBaseException as error:
            text = str(error).splitlines()[0]
            follows_missing = "while resolving interpolation: Missing mandatory value" in text  # reported where it is
            if not follows_missing:
                # of a fact that the data lacks, what follows it within the data is reported, not what the net lacks too
                cause = "a fact" if _missing_fact(error) and text not in messages else text
                messages.setdefault(cause, _message(error))
    return list(messages.values())


def _missing_fact(error: OmegaConfBaseException) -> str:
    """Return what a net has to know of its data and they do not declare; empty for another error."""
    match = re.search(r"Interpolation key 'data\.(\w+)' not found", str(error))
    return match[1] if match and str(error.full_key).startswith("model.") else ""


def _message(error: OmegaConfBaseException) -> str:
    key, text = error.full_key or "the configuration", str(error).splitlines()[0]
    if fact := _missing_fact(error):
        return (
            f"{key} follows data.{fact}, which this data set does not declare: choose data for this kind of model, "
            "such as data=digits for images or data=synthetic_tokens for tokens."
        )
    if text.startswith(_OUR_RESOLVER):
        return text.removeprefix(_OUR_RESOLVER)
    if text.startswith("Missing mandatory value"):
        return f"{key}: a value has to be given, {key}=...; --help {key} says what it takes."
    if match := re.fullmatch(r"Interpolation key '([\w.]+)' not found", text):
        return f"{key}: it follows {match[1]}, which is not there; give either."
    return f"{key}: {text}"


def differences(old: dict[str, Any], new: dict[str, Any], ignore: Sequence[str] = ()) -> list[str]:
    """Return a line `key: old -> new` for every leaf that differs, except for the keys `ignore` and those below."""
    before, after = flatten(old), flatten(new)
    keys = [key for key in before.keys() | after.keys() if before.get(key) != after.get(key)]
    return [
        f"{key}: {before.get(key, 'absent')} -> {after.get(key, 'absent')}"
        for key in sorted(keys)
        if not any(f"{key}.".startswith(f"{name}.") for name in ignore)
    ]


def changes(saved: dict[str, Any], requested: dict[str, Any], run: str, ignore: Sequence[str]) -> list[str]:
    """Return the differences between the saved configuration of a run directory and the configuration asked for.

    A path that leads to the run itself is not one: it was typed as logs/latest, which led to another run before.
    """
    own = f" -> {os.path.realpath(run)}"
    lines = differences(saved, with_absolute_paths(requested), ignore)
    return [line for line in lines if not re.match(r"\S*(ckpt_path|\.teacher): ", line) or not line.endswith(own)]


def with_absolute_paths(cfg: dict[str, Any]) -> dict[str, Any]:
    """Return a copy with real paths for the runs and files that a run starts from or learns from.

    logs/latest leads to another run as soon as this one begins, and a run directory is used from any directory.
    """
    cfg = copy.deepcopy(cfg)
    cfg["ckpt_path"] = _real(cfg.get("ckpt_path"))
    sections = [("pretrained", cfg.get("model")), *(("folder", node) for node in _data_nodes(cfg))]
    sections += [("teacher", node) for node in (cfg.get("compression") or {}).values()]
    for key, node in sections:
        if isinstance(node, dict) and key in node:
            node[key] = _real(node[key])
    return cfg


def _real(value: Any) -> Any:
    if isinstance(value, list):
        return [_real(item) for item in value]
    if isinstance(value, dict) and "weights" in value:
        return {**value, "weights": _real(value["weights"])}
    is_path = isinstance(value, str) and value != "ema" and os.path.exists(value)
    return os.path.realpath(newest_run(value)) if is_path else value


def _data_nodes(cfg: dict[str, Any]) -> list[dict[str, Any]]:
    data = cfg.get("data") or {}
    return [node for node in (data, data.get("source")) if isinstance(node, dict)]


def set_data_folder(cfg: dict[str, Any], folder: str | None) -> None:
    """Set where the data of a run are now; None keeps the folder of its configuration."""
    if folder is None:
        return
    nodes = [node for node in _data_nodes(cfg) if isinstance(node.get("folder"), str)]
    require(bool(nodes), f"data.folder={folder}: the run's data were in no folder of the user's: leave it null.")
    require(os.path.isdir(folder), f"data.folder={folder} is not a folder: give the one that has the run's data now.")
    for node in nodes:
        node["folder"] = os.path.realpath(folder)


def data_folder_of(cfg: dict[str, Any]) -> str | None:
    """Return the folder of the data, where a configuration names one."""
    folders = [node["folder"] for node in _data_nodes(cfg) if node.get("folder")]
    return folders[0] if folders and isinstance(folders[0], str) else None


def newest_run(path: str, checkpoints: bool = True) -> str:
    """Return the newest run directory in a folder of runs such as logs/<name>; any other path as it is.

    With `checkpoints`, runs without a checkpoint are taken only if no run has one.
    """
    runs = [os.path.dirname(file) for file in glob.glob(f"{glob.escape(path)}/????-??-??_??-??-??_*/environment.json")]
    if checkpoints:
        runs = [run for run in runs if glob.glob(f"{glob.escape(run)}/checkpoints/**/*.ckpt", recursive=True)] or runs
    return max(runs, key=lambda run: (os.path.getmtime(f"{run}/environment.json"), run), default=path)


# OmegaConf merges the keys of two classes, and refuses a list for a group, such as data.augment=[...]. Hydra calls
# `merge_with` for each file and override and has no option for this, so the method itself is replaced: a node of
# another class replaces a node, a list a group, and a group a list.

_merge_with = BaseContainer.merge_with


def _merge(self: BaseContainer, *others: Any) -> None:
    for other in others:
        new = other if OmegaConf.is_config(other) or other is None else OmegaConf.create(other)
        parent = self._get_parent()
        if isinstance(parent, DictConfig) and _is_replaced(self, new):
            parent._set_item_impl(self._key(), new)
        else:
            _remove_replaced(self, new)
            _merge_with(self, new)


def _is_replaced(old: Any, new: Any) -> bool:
    if {type(old), type(new)} == {DictConfig, ListConfig}:
        return True
    targets = [tree._get_node("_target_", validate_access=False) if _has_keys(tree) else None for tree in (old, new)]
    return None not in targets and targets[0] != targets[1]


def _remove_replaced(old: Any, new: Any) -> None:
    if not _has_keys(old) or not _has_keys(new):
        return
    for key in new:
        before, after = (tree._get_node(key, validate_access=False) for tree in (old, new))
        if _is_replaced(before, after):
            old._set_item_impl(key, None)
        else:
            _remove_replaced(before, after)


def _has_keys(node: Any) -> bool:
    return isinstance(node, DictConfig) and not (node._is_none() or node._is_missing() or node._is_interpolation())


BaseContainer.merge_with = _merge  # type: ignore[method-assign]
