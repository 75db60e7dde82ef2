"""What a composed configuration must satisfy before any data or device is touched. Imports no torch: it has to answer
at once.
"""

import copy
import glob
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, Literal

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

import lathe.config.merging  # noqa: F401 (it takes effect)
from lathe.config.class_folders import class_names
from lathe.config.schema import (
    CLASHES,
    CONTRADICTIONS,
    Problem,
    Together,
    command_keys,
    follows,
    key_schemas,
    kind_of,
    problems,
    shown,
    together,
)
from lathe.errors import UserError, require

# What a file of the group data may say for the classes of a folder, and for how many there are.
OmegaConf.register_new_resolver("lathe.class_names", class_names, replace=True)
OmegaConf.register_new_resolver("lathe.count", lambda names: None if names is None else len(names), replace=True)
CPU_PROCESSES_PER_CORE = 4  # more than this on one machine is a typing mistake, not a plan


def flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Leaves of nested dicts keyed by dotted path; a list counts as one leaf."""
    if not isinstance(tree, dict) or not tree:
        return {prefix: tree}
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        leaves.update(flatten(value, f"{prefix}.{key}" if prefix else str(key)))
    return leaves


def resolve(cfg: DictConfig) -> dict[str, Any]:
    """The configuration as plain nested dicts and lists with every interpolation resolved.

    Raises:
        UserError: interpolations lead nowhere, or mandatory values (`???`) are missing.
    """
    try:
        container = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise UserError(*(_unresolved(cfg) or [_why(error)])) from error
    assert isinstance(container, dict)
    return {str(key): value for key, value in container.items()}


def _unresolved(cfg: DictConfig) -> list[str]:
    """A sentence for each thing that values need and that is not there."""
    found: dict[str, str] = {}
    for key, value in flatten(OmegaConf.to_container(cfg)).items():
        if value == "???" or "${" in str(value):
            try:
                there = OmegaConf.select(cfg, key, throw_on_missing=True)
                OmegaConf.to_container(there, resolve=True, throw_on_missing=True) if OmegaConf.is_config(
                    there
                ) else None
            except OmegaConfBaseException as error:
                if "while resolving interpolation: Missing mandatory value" not in str(
                    error
                ):  # that one is told itself
                    said = str(error).splitlines()[0]
                    # of a key that is gone, what follows it within the data is told, and not what a net misses as well
                    found.setdefault("a fact" if _fact(error) and said not in found else said, _why(error))
    return list(found.values())


def _fact(error: OmegaConfBaseException) -> str:
    """What a net needs to know of its data, and they do not declare; empty where that is not it."""
    fact = re.search(r"Interpolation key 'data\.(\w+)' not found", str(error))
    return fact.group(1) if fact and str(error.full_key).startswith("model.") else ""


_RAISED = "UserError raised while resolving interpolation: "


# What OmegaConf says of an interpolation, and what is meant.
_LACKING = (
    (r"Interpolation key '([\w.]+)' not found", r"it follows \1, which is not there; give either."),
    (
        r".*\"Environment variable '(.*)' not found\"",
        r"the environment variable \1 is not set: set it, or write ${oc.env:\1,<a default>}.",
    ),
    (r"Unsupported interpolation type (.*)", r"${\1:...}: there is no such resolver; give a value, or ${a.key}."),
    (r"Recursive interpolation detected", r"it follows itself: give a value."),
    (r"\w+ raised while resolving interpolation: (.*)", r"its ${...} can't be resolved (\1): give a value."),
)


def _why(error: OmegaConfBaseException) -> str:
    if _fact(error):
        return (
            f"{error.full_key} follows data.{_fact(error)}, which this data set does not declare: choose data for this "
            "kind of model, such as data=digits for images or data=synthetic_tokens for tokens."
        )
    key, said = error.full_key or "the configuration", str(error).splitlines()[0]
    if said.startswith(_RAISED):  # a resolver of Lathe's own
        return said.removeprefix(_RAISED)
    if said.startswith("Missing mandatory value"):
        return f"{key}: a value has to be given, {key}=...; --help {key} says what it takes."
    for pattern, sentence in _LACKING:
        found = re.fullmatch(pattern, said)
        if found:
            return f"{key}: {found.expand(sentence)}"
    return f"{key}: {said}"


def _fits(default: Any, value: Any) -> bool:
    if default is None or value is None:
        return True
    if isinstance(default, bool) or isinstance(value, bool):
        return isinstance(default, bool) and isinstance(value, bool)
    if isinstance(default, float):
        return isinstance(value, (int, float))
    return isinstance(value, type(default))


def mistyped(
    typed: Sequence[str], cfg: dict[str, Any], defaults: dict[str, Any], verb: str = "train"
) -> Iterator[Problem]:
    """Holds each typed override of a part that no table of `schema` knows against the type of the default it replaces;
    gives keys and the sentences that say what is wrong there.

    `typed` are the dotted keys of the overrides; `defaults` is the configuration of the same groups without them, flat.
    A default of null says nothing about the type, and null is always taken: each YAML comment says what it does.
    """
    values, reference, known = flatten(cfg), flatten(defaults), key_schemas(cfg, verb)
    for key in typed:
        for leaf in [name for name in values if (name == key or name.startswith(f"{key}.")) and name not in known]:
            default, value = reference.get(leaf), values[leaf]
            if not _fits(default, value):
                yield (
                    leaf,
                    f"{leaf}={value!r} is {kind_of(value)}, but it takes {kind_of(default)}, such as {default!r}.",
                )
        if key not in values and not any(name.startswith(f"{key}.") for name in values):
            yield key, f"{key}: it was typed, and another word leaves it out: keep one of the two."
        elif key not in values and isinstance(reference.get(key), (int, float, str)):
            such = f"it takes {kind_of(reference[key])}, such as {reference[key]!r}."
            yield key, f"{key} is a group of keys here, but {such}"


GROUPS = ("data", "task", "model", "optimizer", "trainer", "strategy", "precision", "compile", "callbacks", "logger")
READ_AGAIN = ("data", "task", "model", "trainer", "strategy", "precision")  # what a job on a finished run builds


def check(
    cfg: dict[str, Any],
    verb: str = "train",
    rules: Iterable[Together] | None = (),
    raw: Any = None,
    saved: Literal["run", "parts"] | None = None,
    more: Iterable[Problem] = (),
) -> list[str]:
    """Everything that is wrong with a resolved configuration, a sentence for each mistake, beginning with its key.
    Needs no torch.

    Each key is checked alone, then, if all fit, what keys mean together: the rules of `schema` and these `rules` (None:
    neither). A key that follows one that does not fit is not reported. `raw` is the
    configuration before it was resolved, if that is known, and `more` what else is wrong with single keys. Of a `saved`
    configuration, what a job on a run directory (`parts`) does not build is left out.
    """
    training, old = command_keys("train", {}).keys() <= command_keys(verb, cfg).keys(), saved is not None
    keys = {key: value for key, value in cfg.items() if saved != "parts" or key in READ_AGAIN}
    followed = follows(raw)
    read = None if raw is None else {name.split(".")[0] for names in followed.values() for name in names}
    alone: dict[str, str] = {}
    for key, sentence in chain(_groups(cfg, old) if training else (), problems(keys, verb, read, old), more):
        alone.setdefault(key, sentence)
    # What follows a refused key, or lies below one, was told with it.
    told = [
        sentence for key, sentence in alone.items() if not ((followed.get(key, set()) | _above(key)) & alone.keys())
    ]
    if rules is None or alone:
        return told
    shipped = (CLASHES if old else CONTRADICTIONS) if training else ()
    return [*told, *together([*shipped, *rules], cfg)]


def _above(key: str) -> set[str]:
    parts = key.split(".")
    return {".".join(parts[:end]) for end in range(1, len(parts))}


def _groups(cfg: dict[str, Any], saved: bool) -> Iterator[Problem]:
    for group in [name for name in GROUPS if not isinstance(cfg.get(name), dict) and (saved or name in cfg)]:
        yield (
            group,
            f"{group}={shown(cfg.get(group))}: a run needs this group; choose one of the files in configs/{group}, in "
            f"a YAML file by - override /{group}: <name> in its defaults.",
        )


def pinned(cfg: dict[str, Any]) -> dict[str, Any]:
    """A copy of a resolved configuration in which the runs and files that it starts from or learns from (`ckpt_path`,
    `model.pretrained`, teachers, a folder of data) stand with their real, absolute paths: logs/latest leads to another
    run as soon as this one has begun, and a run directory is used from any working directory."""
    cfg = copy.deepcopy(cfg)
    cfg["ckpt_path"] = _real(cfg.get("ckpt_path"))
    for node in (cfg.get("data"), (cfg.get("data") or {}).get("source")):
        if isinstance(node, dict) and "folder" in node:
            node["folder"] = _real(node["folder"])
    if "pretrained" in (cfg.get("model") or {}):
        cfg["model"]["pretrained"] = _real(cfg["model"]["pretrained"])
    for node in (cfg.get("compression") or {}).values():
        if isinstance(node, dict) and "teacher" in node:
            node["teacher"] = _real(node["teacher"])
    return cfg


def data_at(cfg: dict[str, Any], folder: str | None) -> None:
    """Lets a run's resolved configuration read its data in `folder`, where they lie now; None leaves it.

    Raises:
        UserError: it is no folder, or the run's data were in none.
    """
    if folder is None:
        return
    nodes = [node for node in (cfg["data"], cfg["data"].get("source")) if isinstance(node, dict)]
    there = [node for node in nodes if isinstance(node.get("folder"), str)]
    require(bool(there), f"data.folder={folder}: the run's data were in no folder of the user's: leave it null.")
    require(os.path.isdir(folder), f"data.folder={folder} is no folder: give the one that the run's data are in now.")
    for node in there:
        node["folder"] = os.path.realpath(folder)


def folder_of(cfg: dict[str, Any]) -> str | None:
    """The folder of the data, where a configuration names one."""
    data = cfg["data"]
    found = data.get("folder") or (data.get("source") or {}).get("folder")
    return found if isinstance(found, str) else None


def _real(value: Any) -> Any:
    if isinstance(value, list):
        return [_real(item) for item in value]
    if isinstance(value, dict) and "weights" in value:
        return {**value, "weights": _real(value["weights"])}
    real = isinstance(value, str) and value != "ema" and os.path.exists(value)
    return os.path.realpath(newest_run(value)) if real else value


def newest_run(path: str, checkpoints: bool = True) -> str:
    """Return the run directory in a folder of runs, such as logs/<name>, that began last, with `checkpoints` of those
    that have one if there are any; any other path as it is."""
    began = glob.glob(f"{glob.escape(path)}/????-??-??_??-??-??_*/environment.json")  # written when a run begins
    if checkpoints:
        folders = {file: f"{glob.escape(os.path.dirname(file))}/checkpoints" for file in began}
        began = [file for file in began if glob.glob(f"{folders[file]}/**/*.ckpt", recursive=True)] or began
    return os.path.dirname(max(began, key=lambda file: (os.path.getmtime(file), file))) if began else path


def changes(saved: dict[str, Any], asked: dict[str, Any], own: str, ignore: Sequence[str]) -> list[str]:
    """`differences` between the configuration that a run has saved in its directory `own` and the one that is asked
    for. A path in the latter that leads to `own` was typed as logs/latest, which led elsewhere when the run began: it
    is no difference."""
    lines = differences(saved, pinned(asked), ignore)
    here = f" -> {os.path.realpath(own)}"
    return [
        line for line in lines if not (line.endswith(here) and line.split(":")[0].endswith(("ckpt_path", ".teacher")))
    ]


def differences(old: dict[str, Any], new: dict[str, Any], ignore: Sequence[str] = ()) -> list[str]:
    """Lines `key: old -> new` for every leaf that differs, leaving out keys that equal or lie below one of `ignore`."""
    before, after = flatten(old), flatten(new)
    lines = []
    for key in sorted(before.keys() | after.keys()):
        if any(key == name or key.startswith(f"{name}.") for name in ignore):
            continue
        if before.get(key) != after.get(key):
            lines.append(f"{key}: {before.get(key, 'absent')} -> {after.get(key, 'absent')}")
    return lines
