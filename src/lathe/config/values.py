"""Single values and the JSON Schemas that they have to fit: the check, and the sentence for one that does not.

Imports no torch. Schemas are flat: `type`, `enum`, bounds, `pattern`, `items`, and `anyOf` of these.
"""

import functools
import json
import math
import os
import re
from collections.abc import Mapping
from typing import Any

import jsonschema_rs

from lathe.errors import did_you_mean

Json = dict[str, Any]
NODE: Json = {"type": "object", "required": ["_target_"]}
NULL: Json = {"type": "null"}
LARGEST = 2**63 - 1  # what a tensor's size and a checkpoint's counter can hold
LONGEST = 4096  # characters of a string or a path
# A string that YAML would read as something else without its quotes.
_NEEDS_QUOTES = re.compile(r"[-+\d.].*|[\[{].*|null|~|true|false", re.IGNORECASE)
_KINDS = {dict: "a group of keys", list: "a list", bool: "true or false", int: "a whole number", float: "a number"}
_TYPES = {"integer": "a whole number", "number": "a number", "boolean": "true or false", "null": "null"}


def plain(value: Any) -> Any:
    """Return a value as YAML has it: tuples as lists, NumPy's numbers as Python's, paths as strings."""
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)) or type(value).__name__ == "ListConfig":  # OmegaConf's
        return [plain(item) for item in value]
    if hasattr(value, "dtype") and hasattr(value, "item") and getattr(value, "ndim", 1) == 0:
        return value.item()
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def is_valid(value: Any, schema: Json) -> bool:
    """Check a plain value against a schema. A float is never a whole number, and no number is infinite or NaN."""
    if not schema:
        return True
    if not _is_text(value) or not _is_finite(value):
        return False
    if isinstance(value, float):
        schema = {"anyOf": [kind for kind in kinds(schema) if kind.get("type") != "integer"]}
    try:
        return bool(schema.get("anyOf", True)) and bool(_validator(json.dumps(schema)).is_valid(_with_text_keys(value)))
    except (TypeError, ValueError):  # an object, or a key that is not text
        return False


def _with_text_keys(value: Any) -> Any:
    """Return a value as JSON has it: names that YAML reads as numbers are text."""
    if isinstance(value, list):
        return [_with_text_keys(item) for item in value]
    return {str(key): _with_text_keys(item) for key, item in value.items()} if isinstance(value, Mapping) else value


@functools.cache
def _validator(schema: str) -> Any:
    return jsonschema_rs.validator_for(json.loads(schema))


def _is_finite(value: Any) -> bool:
    """True unless a number in `value` is infinite, NaN or too large."""
    if isinstance(value, (int, float)):
        return math.isfinite(value) if isinstance(value, float) else abs(value) <= LARGEST
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    return all(map(_is_finite, items))


def _is_text(value: Any) -> bool:
    return not isinstance(value, str) or (value == value.strip() and value.isprintable() and len(value) <= LONGEST)


def kinds(schema: Json) -> list[Json]:
    """Return the alternatives of a schema, each of one type or a list of constants."""
    if "anyOf" in schema:
        return [kind for alternative in schema["anyOf"] for kind in kinds(alternative)]
    if "const" in schema:
        description = {"description": schema["description"]} if "description" in schema else {}
        return [{"enum": [schema["const"]], **description}]
    if isinstance(schema.get("type"), list):
        return [NULL if name == "null" else {**schema, "type": name} for name in schema["type"]]
    return [schema]


def problem(key: str, value: Any, schema: Json) -> str | None:
    """Return the sentence for a value that does not fit its key, or None."""
    if is_valid(value, schema):
        return None
    constants = [str(word) for kind in kinds(schema) for word in kind.get("enum", ())]
    hint = did_you_mean(value, constants, "") if isinstance(value, str) and constants else ""
    return f"{key}={shown(value)}: expected {expected(schema)}{f'; {hint}' if hint else '.'}"


def expected(schema: Json) -> str:
    """Describe the values that fit: "a whole number from 1 or null"."""
    phrases: dict[str, None] = {}
    for kind in kinds(schema) if schema else [{}]:
        listed = "enum" in kind and "description" not in kind
        phrases.update(dict.fromkeys(map(shown, kind["enum"])) if listed else {_description(kind): None})
    *first, last = phrases
    return f"{', '.join(first)} or {last}" if first else last


def _description(kind: Json) -> str:
    name = kind.get("type")
    if kind.get("required") == ["_target_"]:
        return "a group with a _target_"
    if "description" in kind:
        return str(kind["description"])
    if name in ("integer", "number"):
        low = f" from {kind['minimum']:.17g}" if "minimum" in kind else ""
        low = f" above {kind['exclusiveMinimum']:.17g}" if "exclusiveMinimum" in kind else low
        high = f" to {kind['maximum']:.17g}" if "maximum" in kind else ""
        high = f" and below {kind['exclusiveMaximum']:.17g}" if "exclusiveMaximum" in kind else high
        return _TYPES[name] + low + high
    if name == "string":
        return f"text of the form {kind['pattern']}" if "pattern" in kind else "a word"
    if name == "array":
        least, most = kind.get("minItems", 0), kind.get("maxItems")
        size = f" of {least} items" if least == most else f" of {least} or more items" if least else ""
        each = f" (each {expected(kind['items'])})" if kind.get("items") else ""
        return f"a list{size}{each}{', none twice' if kind.get('uniqueItems') else ''}"
    if name == "object":
        values = kind.get("additionalProperties")
        each = f" (each {expected(values)})" if isinstance(values, dict) and values else ""
        return f"a group of keys{each}"
    return _TYPES.get(str(name), "anything")


def shown(value: Any) -> str:
    """Return a value on one line as a user would type it, shortened if it is long."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int) and abs(value) > LARGEST:
        return f"{'-' if value < 0 else ''}about 1e{int(math.log10(abs(value)))}"
    bare = isinstance(value, str) and value and _is_text(value) and not _NEEDS_QUOTES.fullmatch(value)
    text = value if bare else repr(value)
    return text if len(text) <= 80 else f"{text[:60]}... ({len(text)} characters)"


def kind_of(value: Any) -> str:
    """Return the kind of a value in words: "a whole number"."""
    if value is None or isinstance(value, str):
        return "null" if value is None else "a word"
    return _KINDS.get(type(value), type(value).__name__)
