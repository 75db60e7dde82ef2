"""Validate a resolved configuration against configs/schema.json. Imports no torch.

The keys of a command are looked up in its section of the schema, those of a component by its `_target_`. Components
that the schema does not have are left to their own constructors: `python scripts/schema.py package=mine` adds yours.
"""

import functools
import json
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from lathe.config.values import NODE, NULL, Json, is_valid, kinds, problem, shown
from lathe.configs import FOLDER, SOURCE
from lathe.errors import did_you_mean

Problem = tuple[str, str]  # a key and the message for it
PLATEAU = "torch.optim.ReduceLROnPlateau"
BUILDER = "lathe.optim.build_optimizer"  # passes what it does not take itself to the class at `kind`
# Groups whose files set keys of the whole configuration.
WHOLE, GLOBAL = ("experiment", "debug", "performance"), "# @package _global_"
TARGET: Json = {
    "type": "string",
    "pattern": r"^[^\W\d]\w*(\.[^\W\d]\w*)+$",
    "description": "the dotted path of a class or function",
}
HYDRA: dict[str, Json] = {
    "_recursive_": {"type": "boolean"},
    "_partial_": {"type": "boolean"},
    "_convert_": {"enum": ["none", "partial", "object", "all"]},
}
# What Lathe gives Lightning's Trainer itself.
FILLED_IN = {
    "precision": "choose precision=bf16-mixed or another file of configs/precision",
    "strategy": "choose strategy=ddp or another file of configs/strategy",
    "logger": "choose logger=tensorboard or other files of configs/logger, logger=none for none",
    "callbacks": "choose callbacks=[default,ema] or other files of configs/callbacks",
    "plugins": "precision=, strategy= and launch= choose the plug-ins",
    "default_root_dir": "set paths.log_dir",
    "barebones": "set enable_checkpointing, enable_progress_bar and enable_model_summary to false, one by one",
    "enable_autolog_hparams": "loggers receive the run's configuration whatever it is",
    "model_registry": "upload what scripts/export.py makes",
}
SHORT_NAMES = ("lathe", "torch")  # roots of names whose modules may be left out
NOUNS = {"compression": "method", "callbacks": "callback", "logger": "logger"}


def canonical(target: str) -> str:
    """Return the name of a component in the schema; its `_target_` may name the module that defines it or not.

    lathe.callbacks.ema.EMA is lathe.callbacks.EMA, lightning.pytorch.callbacks.EarlyStopping lightning.EarlyStopping.
    """
    names = target.split(".")
    if names[0] in ("lightning", "pytorch_lightning"):
        return f"lightning.{names[-1]}"
    return ".".join([*names[:2], names[-1]]) if names[0] in SHORT_NAMES and len(names) > 2 else target


class Known(NamedTuple):
    """A key with its schema."""

    key: str
    schema: Json


@functools.cache
def definitions() -> dict[str, Json]:
    """Return the definitions of configs/schema.json by name."""
    tree: Json = json.loads((FOLDER / "schema.json").read_text(encoding="utf-8"))
    return dict(tree["$defs"])


def resolved(schema: Json) -> Json:
    """Return the schema of a resolved value: references followed, and without interpolations and components' names."""
    reference = str(schema.get("$ref", "")).removeprefix("#/$defs/").replace("~1", "/")
    if reference:
        is_component = "." in reference and not reference.endswith(".yaml")
        return NODE if is_component or reference == "own" else resolved(definitions()[reference])
    if "anyOf" not in schema:
        return schema
    arms = [resolved(arm) for arm in schema["anyOf"] if arm.get("$ref") != "#/$defs/interpolation"]
    arms = [arm for number, arm in enumerate(arms) if arm not in arms[:number]]
    return arms[0] if len(arms) == 1 else {"anyOf": [kind for arm in arms for kind in kinds(arm)]}


def command_keys(command: str, cfg: Mapping[str, Any]) -> dict[str, Json]:
    """Return the schema of each key of a command.

    A user's command has those of train.py if it has all of them; else only keys that the launch reads are checked.
    """
    if command in commands():
        return _keys_of(command)
    train = _keys_of("train")
    if train.keys() <= cfg.keys():
        return train
    return {key: train[key] for key in ("launch", "strategy", "trusted") if key in cfg}


@functools.cache
def _keys_of(command: str) -> dict[str, Json]:
    tree = definitions()[f"{command}.yaml"]["properties"]
    return {key: resolved(schema) for key, schema in tree.items() if key not in ("hydra", "defaults")}


@functools.cache
def commands() -> list[str]:
    """Return the names of Lathe's commands, train first."""
    return [name.removesuffix(".yaml") for name in definitions() if name.endswith(".yaml") and "/" not in name]


def training_commands() -> list[str]:
    """Return the commands that have every key of train.py."""
    return [name for name in commands() if _keys_of("train").keys() <= _keys_of(name).keys()]


@functools.cache
def component_keys(name: str) -> dict[str, Json] | None:
    """Return the schema of each argument of a component, by its canonical name; None where the schema has none."""
    definition = definitions().get(name)
    if definition is None or "." not in name or name.endswith(".yaml"):
        return None
    left_out = ("_target_", "_partial_", "defaults")
    return {key: resolved(schema) for key, schema in definition["properties"].items() if key not in left_out}


def takes(node: Mapping[str, Any]) -> dict[str, Json] | None:
    """Return the schema of each argument that a node's `_target_` takes; None where the schema does not have it."""
    name = canonical(str(node["_target_"]))
    if name != BUILDER:
        return component_keys(name)
    options = component_keys(canonical(_kind(node)))
    if options is None:
        return None
    own = set(definitions()[BUILDER].get("own", ()))
    keys = {key: schema for key, schema in (component_keys(BUILDER) or {}).items() if key in own}
    return keys | {key: {"anyOf": [*kinds(option), NULL]} for key, option in options.items() if key not in own}


def _kind(node: Mapping[str, Any]) -> str:
    """Return the dotted path of an optimizer's class, empty where there is none."""
    kind = node.get("kind")
    return str(kind.get("path")) if isinstance(kind, Mapping) else ""


def own_targets() -> dict[str, str]:
    """Return the modules with the user's export targets, by the name in `@export_target("<name>")`; imports nothing."""
    if SOURCE is None:
        return {}
    return targets_in(SOURCE, *(folder.name for folder in sorted(SOURCE.iterdir()) if folder.name != "lathe"))


def targets_in(source: Path, *packages: str) -> dict[str, str]:
    """Return the modules with `@export_target("<name>")` in folders of `source`, by that name."""
    modules: dict[str, str] = {}
    for file in (file for package in packages for file in sorted((source / package).rglob("*.py"))):
        names = re.findall(r"""^\s*@(?:[\w.]+\.)?export_target\(\s*["'](\w+)["']""", file.read_text(), re.MULTILINE)
        modules |= dict.fromkeys(names, ".".join(file.relative_to(source).with_suffix("").parts))
    return modules


def problems(
    cfg: Mapping[str, Any], command: str, read: Collection[str] | None = None, saved: bool = False
) -> Iterator[Problem]:
    """Give each key whose value does not fit, or that nothing reads, with the message for it.

    `read` are keys at the root that others interpolate; None where that is not known. Keys of a `saved` configuration
    may be missing.
    """
    tree = command_keys(command, cfg)
    for key, value in cfg.items():
        if key in tree:
            yield from (item for item in _check(tree[key], key, value, saved) if not isinstance(item, Known))
        elif key in WHOLE:
            yield key, f"{key}: the chosen file sets no key of the run; it has to begin with the line `{GLOBAL}`."
        elif command in commands() and read is not None and key not in read:
            yield key, f"{key}: unknown key, and nothing reads it; {did_you_mean(key, tree)}"
    for key, schema in tree.items():
        arms = kinds(schema)
        has_null_choice = NULL in arms and any(arm == NODE or "properties" in arm for arm in arms)
        if key not in cfg and not saved and not has_null_choice:
            yield key, f"{key} is missing: leave ~{key} out."


def key_schemas(cfg: Mapping[str, Any], command: str) -> dict[str, Json]:
    """Return the schema of each key of a configuration that has one, by dotted path. Lists count as single values."""
    tree = command_keys(command, cfg)
    results = [result for key, value in cfg.items() if key in tree for result in _check(tree[key], key, value, True)]
    return {result.key: result.schema for result in results if isinstance(result, Known) and "[" not in result.key}


def _check(schema: Json, key: str, value: Any, saved: bool) -> Iterator[Problem | Known]:
    """Give the keys in a value that the schema has, and the problems of these."""
    arms = kinds(schema) if schema else []
    sections = [arm for arm in arms if "properties" in arm]
    if schema and not sections and schema != NODE:
        yield Known(key, schema)
    if isinstance(value, Mapping) and NODE in arms:
        yield from _node(key, value, sections, saved)
    elif isinstance(value, Mapping) and sections:
        yield from _section(sections[0], key, value, saved)
    elif sections or schema == NODE:
        flat = [arm for arm in arms if arm not in sections and arm != NODE]
        if not flat or not is_valid(value, {"anyOf": flat}):
            way = f"write {key}={{_target_: mine.Class}}" if "." in key else f"choose one of the files in configs/{key}"
            yield key, f"{key}={shown(value)}: expected a group of keys; {way}."
    elif message := problem(key, value, schema):
        if not (saved and key == "paths.run_dir"):
            yield key, message
    else:
        yield from _inside(key, value)


def _node(key: str, value: Mapping[str, Any], sections: list[Json], saved: bool) -> Iterator[Problem | Known]:
    """Check a group that may be a component."""
    group, _, name = key.partition(".")
    inner = value.get(key)
    if "_target_" in value:
        yield from _component(key, value, saved)
    elif sections and not value:  # the choice `none`
        return
    elif key == "scheduler" and isinstance(inner, Mapping):  # as Lightning's configure_optimizers returns it
        yield from _component(f"{key}.{key}", inner, saved)
        plan = {name: (component_keys(PLATEAU) or {})[name] for name in ("interval", "frequency", "monitor")}
        rest = {name: item for name, item in value.items() if name != key}
        yield from _section({"properties": plan}, key, rest, saved)
    elif group in NOUNS and name and "." not in name:
        add = f"add {name} to {group}, or set {key}=null."
        yield key, f"{key} sets options of a {NOUNS[group]} that the run does not have: {add}"
    else:
        own = "; with model=lightning it is the module's own: model.net.<key>" if key == "optimizer" else ""
        yield key, f"{key} has no _target_: choose one of the files in configs/{group}{own}."


def _section(section: Json, key: str, value: Mapping[str, Any], saved: bool) -> Iterator[Problem | Known]:
    keys = {name: resolved(schema) for name, schema in section["properties"].items() if name != "defaults"}
    more = section.get("additionalProperties")
    for name, item in value.items():
        below = f"{key}.{name}"
        if name in keys:
            yield from _check(keys[name], below, item, saved)
        elif isinstance(more, dict) and not isinstance(item, Mapping) and item is not None:
            yield below, f"{below}={shown(item)}: a {NOUNS[key]} has a name: {key}.<name>.{name}."
        elif isinstance(more, dict):
            yield from _check(resolved(more), below, item, saved)
        elif key != "target" or name not in own_targets():
            filled = _filled_in(below, item)
            yield below, filled or f"{below}: unknown key in {key}; {did_you_mean(name, keys)}"
    yield from _missing(section, key, value, saved)


def _missing(section: Json, key: str, value: Mapping[str, Any], saved: bool) -> Iterator[Problem]:
    for name in section.get("needs", ()) if not saved else ():
        if name not in value:
            yield f"{key}.{name}", f"{key}.{name} is missing: leave ~{key}.{name} out."


def _filled_in(key: str, value: Any) -> str | None:
    """Return the message for an argument of Lightning's Trainer that another group gives."""
    group, _, name = key.partition(".")
    is_filled_in = group == "trainer" and name in FILLED_IN
    return f"{key}={shown(value)} is not taken from here: {FILLED_IN[name]}." if is_filled_in else None


def _component(key: str, node: Mapping[str, Any], saved: bool = False) -> Iterator[Problem | Known]:
    """Check a component and the components inside it."""
    target = node["_target_"]
    yield Known(f"{key}._target_", TARGET)
    if message := problem(f"{key}._target_", target, TARGET):
        yield f"{key}._target_", message
        return
    keys = takes(node)
    for name, value in node.items():
        below = f"{key}.{name}"
        if name == "_target_":
            continue
        schema = HYDRA.get(name) if keys is None or name in HYDRA else keys.get(name)
        if schema is not None:
            yield from _check(schema, below, value, saved)
        elif keys is None:
            yield from _inside(below, value)
        elif canonical(target) != BUILDER:
            filled = _filled_in(below, value)
            yield below, filled or f"{below}: {target} takes no such argument; {did_you_mean(name, keys)}"
        elif value is not None:
            hint = did_you_mean(name, keys)
            yield below, f"{below}: {_kind(node)} takes no such option; leave it out with {below}=null; {hint}"
    yield from _missing(definitions().get(canonical(target), {}), key, node, saved)


def _inside(key: str, value: Any) -> Iterator[Problem | Known]:
    """Check the components in a list or group that has no schema."""
    if isinstance(value, Mapping) and "_target_" in value:
        yield from _component(key, value)
    elif isinstance(value, (list, Mapping)):
        below = enumerate(value) if isinstance(value, list) else value.items()
        for name, item in below:
            yield from _inside(f"{key}[{name}]" if isinstance(value, list) else f"{key}.{name}", item)


def with_keys(message: str) -> str:
    """Return a message of Lightning's on one line, with keys of the configuration for the arguments of its Trainer."""
    names = "|".join(component_keys("lightning.Trainer") or ())
    text = re.sub(rf"`({names})(=[^`]+)?`", r"trainer.\1\2", " ".join(message.split()))
    return re.sub(r"(?<=\w=)(None|True|False)\b", lambda found: {"None": "null"}.get(found[0], found[0].lower()), text)
