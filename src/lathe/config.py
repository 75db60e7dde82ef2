"""What a composed configuration must satisfy before any data or device is touched. Imports no torch: it has to answer at once."""

import copy
import os
import re
from collections.abc import Sequence
from itertools import chain
from typing import Any, Literal

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lathe.errors import UserError, require
from lathe.schema import clashes, contradictions, kind_of, problems, references, renamed, rules

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
    """The configuration as plain nested dicts and lists with every interpolation resolved, and each part under its name of now.

    Raises:
        UserError: an interpolation leads nowhere, or a mandatory value (`???`) is missing.
    """
    try:
        container = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        fact = re.search(r"Interpolation key 'data\.(\w+)' not found", str(error))
        if fact and str(error.full_key).startswith("model."):
            raise UserError(f"{error.full_key} follows data.{fact.group(1)}, which this data set does not declare: choose data for this "
                            "kind of model, such as data=digits for images or data=synthetic_tokens for tokens.") from error  # fmt: skip
        raise UserError(f"{error.full_key or 'the configuration'}: {str(error).splitlines()[0]}") from error
    assert isinstance(container, dict)
    return {str(key): value for key, value in renamed(container).items()}


def _fits(default: Any, value: Any) -> bool:
    if default is None or value is None:
        return True
    if isinstance(default, bool) or isinstance(value, bool):
        return isinstance(default, bool) and isinstance(value, bool)
    if isinstance(default, float):
        return isinstance(value, (int, float))
    return isinstance(value, type(default))


def check_types(typed: Sequence[str], cfg: dict[str, Any], defaults: dict[str, Any], verb: str = "train") -> None:
    """Holds each typed override of a part that no table of lathe.schema knows against the type of the default it replaces.

    `typed` are the dotted keys of the overrides; `defaults` is the configuration of the same groups without them. A default of null
    says nothing about the type, and null is always taken: each YAML comment says what it does.

    Raises:
        UserError: the first value of another type than its default.
    """
    values, reference, known = flatten(cfg), flatten(defaults), rules(cfg, verb)
    for key in typed:
        for leaf in [name for name in values if (name == key or name.startswith(f"{key}.")) and name not in known]:
            default, value = reference.get(leaf), values[leaf]
            if not _fits(default, value):
                raise UserError(f"{leaf}={value!r} is {kind_of(value)}, but it takes {kind_of(default)}, such as {default!r}.")
        if key not in values and isinstance(reference.get(key), (int, float, str)):
            raise UserError(f"{key} is a group of keys here, but it takes {kind_of(reference[key])}, such as {reference[key]!r}.")


GROUPS = ("data", "model", "optimizer", "trainer", "strategy", "precision", "compile", "callbacks", "logger")


def check_composed(cfg: DictConfig, resolved: dict[str, Any], verb: str) -> None:
    """Holds the configuration `cfg` of a verb, which was just composed, against what its keys take; `resolved` is what it says.

    Raises:
        UserError: a value that its key does not take, or a key that nothing reads.
    """
    read = references(OmegaConf.to_container(cfg, resolve=False))
    for sentence in problems(resolved, verb, read):
        raise UserError(sentence)


# What the configuration of every run has had from the first version on, and no default stands in for.
ALWAYS = ("seed", "trainer.accelerator", "trainer.devices", "trainer.num_nodes", "precision.name")
READ_AGAIN = ("data", "model", "trainer", "strategy", "precision")  # what a job on a finished run builds


def check_values(cfg: dict[str, Any], saved: Literal["run", "parts"] | None = None) -> None:
    """Holds a training configuration against what its keys take alone and together. Needs no torch.

    Of a `saved` one, which an older version may have taken, a `run` that is continued is held against single keys alone, and what a job on
    a run directory (`parts`) does not build is left out.

    Raises:
        UserError: naming the key, its value and the way out.
    """
    for group in GROUPS:
        require(
            isinstance(cfg.get(group), dict),
            f"{group}={cfg.get(group)!r}: a run needs this group; choose one of the files in configs/{group}.",
        )
    keys = {key: value for key, value in cfg.items() if saved != "parts" or key in READ_AGAIN}
    there = flatten(cfg)
    for key in ALWAYS:
        require(key in there, f"{key} is missing from the configuration, which that of every run has: take a whole one.")
    # What keys mean together is asked once each is taken alone.
    for sentence in chain(problems(keys, "train", saved=True), (contradictions if saved is None else clashes)(cfg)):
        raise UserError(sentence)


def pinned(cfg: dict[str, Any]) -> dict[str, Any]:
    """A copy of a resolved configuration in which the runs and files that it starts from or learns from (`ckpt_path`, teachers) stand
    with their real, absolute paths: logs/latest leads to another run as soon as this one has begun."""
    cfg = copy.deepcopy(cfg)
    cfg["ckpt_path"] = _real(cfg.get("ckpt_path"))
    for node in (cfg.get("compression") or {}).values():
        if isinstance(node, dict) and "teacher" in node:
            node["teacher"] = _real(node["teacher"])
    return cfg


def _real(value: Any) -> Any:
    if isinstance(value, list):
        return [_real(item) for item in value]
    if isinstance(value, dict) and "weights" in value:
        return {**value, "weights": _real(value["weights"])}
    return os.path.realpath(value) if isinstance(value, str) and value != "ema" and os.path.exists(value) else value


def changes(saved: dict[str, Any], asked: dict[str, Any], own: str, ignore: Sequence[str]) -> list[str]:
    """`differences` between the configuration that a run has saved in its directory `own` and the one that is asked for. A path in the
    latter that leads to `own` was typed as logs/latest, which led elsewhere when the run began: it is no difference."""
    lines = differences(saved, pinned(asked), ignore)
    here = f" -> {os.path.realpath(own)}"
    return [line for line in lines if not (line.endswith(here) and line.split(":")[0].endswith(("ckpt_path", ".teacher")))]


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
