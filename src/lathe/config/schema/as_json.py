"""The tables as a JSON Schema (draft 2020-12), from which editors complete and check the files in configs/."""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lathe.config.schema.check import CLASSES
from lathe.config.schema.described import comments, files_of, parts, written
from lathe.config.schema.optim import OPTIMIZERS
from lathe.config.schema.places import Part, Parts, Place
from lathe.config.schema.rule import Rule
from lathe.config.schema.targets import own_targets
from lathe.config.schema.verbs import TRAIN, VERBS

Json = dict[str, Any]
BUILDER = "lathe.optim.build_optimizer"
INTERPOLATED: Json = {"$ref": "#/$defs/interpolation"}
OWN: Json = {"$ref": "#/$defs/own"}
NULL: Json = {"type": "null"}
DEFS: Json = {
    "interpolation": {
        "type": "string",
        "pattern": r"\$\{|^\?\?\?$",
        "description": "a value that follows other keys, or has to be given",
    },
    "defaults": {"type": "array", "description": "Hydra's list: the files that this one builds on"},
}


def as_json(rule: Rule) -> Json:
    """What a rule takes."""
    kinds = [_kind(one) for one in rule.kinds()]
    return kinds[0] if len(kinds) == 1 else {"anyOf": kinds}


def _kind(rule: Rule, nodes: Iterable[str] = ()) -> Json:
    if rule.kind in ("whole", "number"):
        ends = {
            "minimum": rule.low,
            "maximum": rule.high,
            "exclusiveMinimum": rule.above,
            "exclusiveMaximum": rule.below,
        }
        span = {"type": "integer" if rule.kind == "whole" else "number"} | {
            name: end for name, end in ends.items() if end is not None
        }
        return {"anyOf": [span, {"enum": list(rule.also)}]} if rule.also else span
    if rule.kind == "flag":
        return {"enum": [one == "true" for one in rule.words]} if rule.words else {"type": "boolean"}
    if rule.kind in ("text", "string"):
        return {"type": "string", "minLength": 1} | ({"pattern": f"^(?:{rule.form})$"} if rule.form else {})
    if rule.kind == "list":
        size = {
            "minItems": rule.least or None,
            "maxItems": rule.most,
            "uniqueItems": rule.different or None,
            "items": None if rule.item is None else _value(rule.item, nodes if rule.item.kind == "node" else ()),
        }
        return {"type": "array"} | {name: value for name, value in size.items() if value is not None}
    if rule.kind == "group":
        names = {"propertyNames": {"enum": list(rule.words)}} if rule.words else {"properties": {"_target_": False}}
        return {"type": "object", **names} | ({} if rule.item is None else {"additionalProperties": _value(rule.item)})
    return {"word": {"enum": list(rule.words)}, "node": OWN, "null": NULL, "any": {}}[rule.kind]


def _value(rule: Rule, nodes: Iterable[str] = ()) -> Json:
    """What a rule takes in a file, where a value may also follow others; `nodes` are the classes that are built
    there.
    """
    kinds = [_kind(one, nodes) for one in rule.kinds()]
    if {} in kinds:
        return {}
    return {"anyOf": [*({"$ref": f"#/$defs/{name}"} for name in nodes), *kinds, INTERPOLATED]}


def _built_at(built: dict[str, list[str]], key: str) -> list[str]:
    """The classes that the files build at a key, or in a list that stands there."""
    return [one for place, names in built.items() if re.sub(r"\[\d+\]$", "", place) == key for one in names]


def named(name: str) -> str:
    """A regular expression for the `_target_`s that mean a class: its file may be named or left out."""
    *room, last = name.split(".")
    if room[0] == "lightning":
        return rf"(pytorch_)?lightning(\.\w+)*\.{last}"
    return rf"{re.escape('.'.join(room))}(\.\w+)*\.{last}" if room[0] == "lathe" else re.escape(name)


def schema(folder: Path) -> Json:
    """The schema of every file in a folder of configurations: any of those of a verb or a group."""
    files = files_of(folder)
    found = written(folder, files)
    built = {key: [name for name in names if name in CLASSES] for key, names in parts(found).items()}
    everything = comments(found)
    defs = dict(DEFS)
    defs["own"] = {
        "type": "object",
        "required": ["_target_"],
        "properties": {"_target_": {"type": "string", "not": {"pattern": f"^({'|'.join(map(named, CLASSES))})$"}}},
        "description": "a class or function of your own by its dotted path, and its arguments",
    }
    for name, rules in CLASSES.items():
        places = [place for place, classes in built.items() if name in classes]
        options = list(OPTIMIZERS.values()) if name == BUILDER else []
        properties = {"_target_": {"type": "string", "pattern": f"^{named(name)}$"}, "_partial_": {"type": "boolean"}}
        if any("." not in place for place in places):
            properties["defaults"] = {"$ref": "#/$defs/defaults"}
        for key, rule in rules.items():
            inner = {one for place in places for one in _built_at(built, f"{place}.{key}")}
            properties[key] = _described(everything.get((name, key)), _value(rule, sorted(inner)))
        for key in sorted({key for table in options for key in table}):
            taken = [as_json(table[key]) for table in options if key in table]
            taken = [one for number, one in enumerate(taken) if one not in taken[:number]]
            properties[key] = _described(everything.get((name, key)), {"anyOf": [*taken, NULL, INTERPOLATED]})
        defs[name] = {"type": "object", "properties": properties, "additionalProperties": False}
        if options:  # a file that names the class may give options of an optimizer that no table knows
            known = {"propertyNames": {"enum": list(properties)}}
            defs[name] = {"type": "object", "properties": properties, "anyOf": [known, {"required": ["_target_"]}]}

    groups = {key: place for key, place in TRAIN.items() if not isinstance(place, Rule)} | {
        "target": VERBS["export"]["target"]
    }

    def of(place: Place, key: str, said: dict[tuple[str, str], str], inside: bool = True) -> Json:
        note = said.get(("", key))
        if inside and place == groups.get(key):
            return _file(f"{key}/*.yaml")
        if isinstance(place, Rule):
            return _described(note, _value(place))
        refs = [{"$ref": f"#/$defs/{name}"} for name in built.get(key, ())]
        if isinstance(place, Part):
            return _described(note, {"anyOf": [*refs, OWN, *([NULL] if place.null else [])]})
        if isinstance(place, Parts):
            names = [path.rpartition(".")[2] for path in built if path.rpartition(".")[0] == key]
            inner = {name: of(Part(null=True), f"{key}.{name}", said) for name in names}
            inner |= {name: of(item, f"{key}.{name}", said) for name, item in place.settings.items()}
            return _described(note, _object(inner, "." not in key, {"anyOf": [OWN, NULL]}))
        inner = {name: of(item, f"{key}.{name}", said) for name, item in place.keys.items()}
        mine = own_targets() if key == "target" else {}
        inner |= {name: {} for name in mine if (folder / "target" / f"{name}.yaml").exists()}
        tree = _object(inner, "." not in key)
        return _described(note, {"anyOf": [tree, NULL]} if place.null else tree)

    for verb, tree in VERBS.items():
        said = everything | comments([item for item in found if item.file == f"configs/{verb}.yaml"])
        defs[f"{verb}.yaml"] = _object(
            {"hydra": {}, **{key: of(place, key, said) for key, place in tree.items()}}, True
        )
    for key, place in groups.items():
        defs[f"{key}/*.yaml"] = of(place, key, everything, inside=False)
    defs["hydra/*.yaml"] = {"type": "object", "required": ["output_subdir"]}  # Hydra's own keys
    kinds = [_file(name) for name in defs if name.endswith(".yaml")]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Lathe's configuration files; written by `python scripts/schema.py`",
        "files": [path.relative_to(folder).as_posix() for path in files if path.parent.name != "local"],
        "anyOf": kinds,
        "$defs": defs,
    }


def _file(name: str) -> Json:
    return {"$ref": f"#/$defs/{name.replace('/', '~1')}"}


def _described(note: str | None, tree: Json) -> Json:
    return {"description": note, **tree} if note else tree


def _object(properties: Json, top: bool, more: Any = False) -> Json:
    first = {"defaults": {"$ref": "#/$defs/defaults"}} if top else {}
    return {"type": "object", "properties": first | properties, "additionalProperties": more}


def text(folder: Path) -> str:
    """The file's text: a line for each key, so that a change of one is a change of one line."""
    tree = schema(folder)
    blocks = []
    for name, one in tree.pop("$defs").items():
        rest = {key: value for key, value in one.items() if key != "properties"}
        lines = [f"   {_line(key)}: {_line(value)}" for key, value in one.get("properties", {}).items()]
        inner = ',\n  "properties": {\n' + ",\n".join(lines) + "\n  }" if lines else ""
        blocks.append(f" {_line(name)}: {_line(rest)[:-1]}{inner}}}")
    return f'{_line(tree)[:-1]},\n"$defs": {{\n' + ",\n".join(blocks) + "\n}}\n"


def _line(tree: Any) -> str:
    return json.dumps(tree, ensure_ascii=False)
