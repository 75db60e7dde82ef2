"""Write configs/schema.json from signatures, config/commands.py and the comments in configs/.

Editors, the launch, `--help` and the reference use it. Two keywords are Lathe's: `needs`, keys that a whole
configuration has, and `own`, the options that `build_optimizer` does not pass on.
"""

import importlib
import inspect
import json
import pkgutil
import re
import types
import typing
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from typing_extensions import is_typeddict

from lathe.config import commands
from lathe.config.help_key import Entry, classes_by_key, comments, files_of, read_entries
from lathe.config.schema import BUILDER, FILLED_IN, PLATEAU, canonical, own_targets
from lathe.config.validation import parameter_schemas, schema_of
from lathe.config.values import NODE, NULL, Json, kinds


def _ref(name: str) -> Json:
    return {"$ref": f"#/$defs/{name.replace('/', '~1')}"}


def _closed(properties: Json) -> Json:
    return {"type": "object", "properties": properties, "additionalProperties": False}


def _described(note: str | None, tree: Json) -> Json:
    return {"description": note, **tree} if note else tree


INTERPOLATED, OWN = _ref("interpolation"), _ref("own")
DEFS: Json = {
    "interpolation": {
        "type": "string",
        "pattern": r"\$\{|^\?\?\?$",
        "description": "a value that follows other keys, or has to be given",
    },
    "defaults": {"type": "array", "description": "Hydra's list: the files that this one builds on"},
}
OUR_ROOTS = ("lathe", "lightning", "torch", "hydra")
ROOMS = ("callbacks", "compression", "data", "nets", "tasks", "optim", "strategies", "loggers", "contrib")
# arguments that a run supplies, and no file sets
GIVEN = {"net", "params", "optimizer", "scheduler", "total_steps", "run_dir", "core", "example"}


class Schema:
    """The schema of the files in a folder of configurations, and of the components of further `packages`."""

    def __init__(self, folder: Path, packages: Iterable[str] = ()) -> None:
        self.folder, self.packages = folder, list(packages)
        self.files = files_of(folder, commands.COMMANDS)
        self.entries = read_entries(folder, self.files)
        self.comments = comments(self.entries)
        self.built = classes_by_key(self.entries)
        self.parts: dict[str, Any] = {}
        for name, part in _components(self.entries, packages):
            if callable(part):
                self.parts.setdefault(name, part)
        self.components = {name: self._parameters(name, part) for name, part in self.parts.items()}

    def build(self) -> Json:
        defs = dict(DEFS)
        known = "|".join(map(name_pattern, self.components))
        defs["own"] = {
            "type": "object",
            "required": ["_target_"],
            "properties": {"_target_": {"type": "string", "not": {"pattern": f"^({known})$"}}},
            "description": "a class or function of your own by its dotted path, and its arguments",
        }
        defs |= {name: self._component(name) for name in self.components}
        train = typing.get_type_hints(commands.Train, include_extras=True)
        groups = {key: hint for key, hint in train.items() if any(map(is_typeddict, _arms(_bare(hint))))}
        groups["target"] = commands.ExportTarget
        for command, tree in commands.COMMANDS.items():
            notes = self.comments | comments([item for item in self.entries if item.file == f"configs/{command}.yaml"])
            defs[f"{command}.yaml"] = self._section(tree, "", groups, notes, command=True)
        for key, hint in groups.items():
            defs[f"{key}/*.yaml"] = self._value(hint, key, {}, self.comments)
        defs["hydra/*.yaml"] = {"type": "object", "required": ["output_subdir"]}  # Hydra's own keys
        return {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "title": "Lathe's configuration files; written by `python scripts/schema.py`",
            "files": [path.relative_to(self.folder).as_posix() for path in self.files if path.parent.name != "local"],
            "packages": sorted(self.packages),
            "anyOf": [_ref(name) for name in defs if name.endswith(".yaml")],
            "$defs": defs,
        }

    def _parameters(self, name: str, part: Any) -> dict[str, Json]:
        """Return the options of a component: its signature's parameters and the keys that the launch reads."""
        groups = {key.split(".")[0] for key, names in self.built.items() if name in names}
        supplied = {*GIVEN, "start_step"} if "logger" in groups else GIVEN
        schemas = {key: value for key, value in parameter_schemas(part).items() if key not in supplied}
        for group in groups & commands.FACTS.keys():
            tree = commands.Plateau if name == PLATEAU else commands.FACTS[group]
            hints = typing.get_type_hints(tree, include_extras=True)
            schemas |= {key: schema_of(_bare(hint)) for key, hint in hints.items()}
        if name == "lightning.Trainer":
            schemas = {key: value for key, value in schemas.items() if key not in FILLED_IN}
        return schemas

    def _component(self, name: str) -> Json:
        paths = [path for path, classes in self.built.items() if name in classes]
        properties: Json = {
            "_target_": {"type": "string", "pattern": f"^{name_pattern(name)}$"},
            "_partial_": {"type": "boolean"},
        }
        if any("." not in path for path in paths):
            properties["defaults"] = _ref("defaults")
        for key, value in self.components[name].items():
            inner = sorted({component for path in paths for component in self._built_at(f"{path}.{key}")})
            properties[key] = _described(self.comments.get((name, key)), in_ref(value, inner))
        tree: Json = {"type": "object", "properties": properties, "additionalProperties": False}
        if name == "lightning.Trainer":
            tree["needs"] = sorted(commands.Trainer.__required_keys__)
        if name == BUILDER:  # options of any optimizer; null leaves one out
            options: dict[str, list[Json]] = {}
            from torch.optim import Optimizer

            for kind, part in self.parts.items():
                if inspect.isclass(part) and issubclass(part, Optimizer):
                    for key, value in self.components[kind].items():
                        options.setdefault(key, []).append(value)
            for key in sorted(options.keys() - properties.keys()):
                value = {"anyOf": [component for value in options[key] for component in kinds(value)]}
                properties[key] = _described(self.comments.get((name, key)), in_ref(value, ()))
            tree = {"type": "object", "properties": properties, "own": list(self.components[name])}
            tree["anyOf"] = [{"propertyNames": {"enum": list(properties)}}, {"required": ["_target_"]}]
        return tree

    def _built_at(self, key: str) -> list[str]:
        """Return the components that the files build at a key, or in a list at that key."""
        at_key = {path: names for path, names in self.built.items() if re.sub(r"\[\d+\]$", "", path) == key}
        return [name for names in at_key.values() for name in names if name in self.components]

    def _section(self, tree: Any, key: str, groups: Json, notes: Any, command: bool = False) -> Json:
        properties: Json = {"hydra": {}} if command else {}
        if "." not in key:
            properties["defaults"] = _ref("defaults")
        needs = [] if command else sorted(tree.__required_keys__)
        for name, hint in typing.get_type_hints(tree, include_extras=True).items():
            below = f"{key}.{name}" if key else name
            is_group = hint == groups.get(below)
            properties[name] = _ref(f"{below}/*.yaml") if is_group else self._value(hint, below, groups, notes)
        if tree in (commands.Target, commands.ExportTarget):
            from lathe.export import TARGETS, get

            for name in TARGETS:
                if not (self.folder / "target" / f"{name}.yaml").exists():
                    continue
                properties[name] = {}  # a user's own is checked by its constructor
                if name not in own_targets():
                    kind: Any = type(get(name))
                    options = {key: in_ref(value, ()) for key, value in parameter_schemas(kind).items()}
                    properties[name] = {"anyOf": [_closed(options), NULL]}
        if getattr(tree, "__pydantic_config__", {}).get("extra") != "allow":
            return _closed(properties) | ({"needs": needs} if needs else {})
        inner = {path.rpartition(".")[2]: path for path in self.built if path.rpartition(".")[0] == key}
        for name, path in inner.items():
            refs = [_ref(component) for component in self._built_at(path)]
            properties[name] = _described(notes.get(("", path)), {"anyOf": [*refs, OWN, NULL]})
        return _closed(properties) | {"additionalProperties": {"anyOf": [OWN, NULL]}, "needs": needs}

    def _value(self, hint: Any, key: str, groups: Json, notes: Any) -> Json:
        hint = _bare(hint)
        arms = _arms(hint)
        note = notes.get(("", key))
        sections = [arm for arm in arms if is_typeddict(arm)]
        if not sections:
            return _described(note, in_ref(schema_of(hint), ()))
        variants: list[Json] = []
        for arm in sections:
            if _inherits(arm, commands.Component):
                variants += [_ref(name) for name in self._built_at(key)] + [OWN]
                variants += [INTERPOLATED] if "." in key else []  # ??? in a file
            elif arm is commands.Nothing:
                variants.append(_closed({"defaults": {}}))
            else:
                variants.append(self._section(arm, key, groups, notes))
        rest = [schema_of(arm) for arm in arms if arm not in sections]
        tree = variants[0] if len(variants) == 1 and not rest else {"anyOf": [*variants, *rest]}
        return _described(note, tree)


def in_ref(schema: Json, nodes: Iterable[str]) -> Json:
    """Return the schema of a value in a file, which may also be an interpolation or one of `nodes`."""
    if not schema:
        return {}
    flat = [OWN if kind == NODE else kind for kind in kinds(schema)]
    return {"anyOf": [*(_ref(name) for name in nodes), *flat, INTERPOLATED]}


def name_pattern(name: str) -> str:
    """Return a regular expression for the `_target_`s of a component, with or without its module."""
    *room, last = name.split(".")
    if room[0] == "lightning":
        return rf"(pytorch_)?lightning(\.\w+)*\.{last}"
    return rf"{re.escape('.'.join(room))}(\.\w+)*\.{last}" if room[0] in ("lathe", "torch") else re.escape(name)


def _components(entries: list[Entry], packages: Iterable[str]) -> Iterator[tuple[str, Any]]:
    """Yield the canonical name and the class or function of each component, the same one perhaps several times."""
    import torch

    for room in ROOMS:
        module = importlib.import_module(f"lathe.{room}")
        for name in module.__all__:
            part = getattr(module, name)
            function = part.__init__ if inspect.isclass(part) else part
            if getattr(function, "is_validated", False):
                yield f"lathe.{room}.{name}", part
    for name, kind in vars(torch.optim).items():
        if inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer:
            yield f"torch.optim.{name}", kind
    yield PLATEAU, torch.optim.lr_scheduler.ReduceLROnPlateau
    for item in entries:
        is_target = item.name == "_target_" or item.key.endswith(".kind.path")
        if is_target and item.value.partition(".")[0] in OUR_ROOTS:  # a user's are read from `packages`
            where, _, name = item.value.rpartition(".")
            yield canonical(item.value), getattr(importlib.import_module(where), name)
    for package in packages:
        path = getattr(importlib.import_module(package), "__path__", ())
        for name in (package, *(module_info.name for module_info in pkgutil.walk_packages(path, f"{package}."))):
            for key, part in vars(importlib.import_module(name)).items():
                if not key.startswith("_") and callable(part) and getattr(part, "__module__", "") == name:
                    yield f"{name}.{key}", part


def _bare(hint: Any) -> Any:
    """Return a TypedDict's annotation without NotRequired."""
    origin = typing.get_origin(hint)
    return _bare(typing.get_args(hint)[0]) if origin in (typing.NotRequired, typing.Required) else hint


def _arms(hint: Any) -> list[Any]:
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    return list(typing.get_args(hint)) if is_union else [hint]


def _inherits(tree: Any, base: Any) -> bool:
    """Return whether a TypedDict inherits from another, which Python does not record."""
    return tree is base or any(
        _inherits(base_class, base) for base_class in getattr(tree, "__orig_bases__", ()) if base_class is not tree
    )


def text(tree: Json) -> str:
    """Return the file's text, with a line for each key, so that diffs are small."""
    tree = dict(tree)
    blocks = []
    for name, definition in tree.pop("$defs").items():
        rest = {key: value for key, value in definition.items() if key != "properties"}
        lines = [f"   {_line(key)}: {_line(value)}" for key, value in definition.get("properties", {}).items()]
        inner = ',\n  "properties": {\n' + ",\n".join(lines) + "\n  }" if lines else ""
        blocks.append(f" {_line(name)}: {_line(rest)[:-1]}{inner}}}")
    return f'{_line(tree)[:-1]},\n"$defs": {{\n' + ",\n".join(blocks) + "\n}}\n"


def _line(tree: Any) -> str:
    return json.dumps(tree, ensure_ascii=False)
