"""Read the JSON Schema of each parameter of a class or function from its annotations."""

import collections.abc
import inspect
import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import PydanticUserError, TypeAdapter
from pydantic.errors import PydanticInvalidForJsonSchema, PydanticSchemaGenerationError
from pydantic.json_schema import GenerateJsonSchema

from lathe.config.values import NODE, Json

PLAIN = (bool, int, float, str, list, dict, tuple, type(None), Path)
_FLAT = ("integer", "number", "boolean", "string", "null")


def parameter_schemas(part: Callable[..., Any]) -> dict[str, Json]:
    """Return the schema of each parameter of a function or constructor, in order; {} where any object is taken.

    A constructor with `**options` has the parameters of its base classes too, but for the class's `fixed_parameters`,
    and of a TypedDict that `Unpack`s there.
    """
    found: dict[str, Json] = {}
    for function in _functions(part):
        hints = typing.get_type_hints(function, include_extras=True)
        for name, parameter in inspect.signature(function).parameters.items():
            hint = hints.get(name, parameter.annotation)
            if parameter.kind is parameter.VAR_KEYWORD:
                if typing.get_origin(hint) is typing.Unpack:
                    options = typing.get_type_hints(typing.get_args(hint)[0], include_extras=True)
                    found.update({key: schema_of(value) for key, value in options.items()})
            elif name != "self" and parameter.kind is not parameter.VAR_POSITIONAL:
                found.setdefault(name, schema_of(hint))
    fixed = getattr(part, "fixed_parameters", ())
    return {name: schema for name, schema in found.items() if name not in fixed}


def _functions(part: Callable[..., Any]) -> list[Callable[..., Any]]:
    """Return the function itself, or the constructors whose arguments a class takes."""
    if not inspect.isclass(part):
        return [inspect.unwrap(part)]
    functions = []
    for base in part.__mro__:
        if "__init__" not in vars(base) or base is object:
            continue
        function = inspect.unwrap(vars(base)["__init__"])
        functions.append(function)
        if not any(one.kind is one.VAR_KEYWORD for one in inspect.signature(function).parameters.values()):
            break
    return functions


def schema_of(annotation: Any) -> Json:
    """Return the JSON Schema of an annotation: {} for Any, NODE for a class of objects.

    A union's tensors are left out: `float | Tensor` is a number in a file.
    """
    if annotation is inspect.Parameter.empty or annotation is Any or isinstance(annotation, str):
        return {}
    arms = typing.get_args(annotation) if typing.get_origin(annotation) in (typing.Union, types.UnionType) else ()
    if arms:
        return _flat({"anyOf": [schema_of(arm) for arm in arms if getattr(arm, "__name__", "") != "Tensor"]})
    if inspect.isclass(annotation) and annotation not in PLAIN and typing.get_origin(annotation) is None:
        return NODE
    try:
        return _flat(TypeAdapter(annotation).json_schema(schema_generator=_Generator))
    except (PydanticUserError, PydanticSchemaGenerationError, PydanticInvalidForJsonSchema):
        origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
        if origin in (list, collections.abc.Sequence):
            return {"type": "array", "items": schema_of(arguments[0])}
        return NODE if origin is collections.abc.Callable else {}


class _Generator(GenerateJsonSchema):
    """A schema without titles and definitions."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def _flat(schema: Json) -> Json:
    """Write `anyOf` of a type and null as one schema with two types, and drop what says nothing."""
    schema = {key: value for key, value in schema.items() if key not in ("title", "format", "default")}
    if "items" in schema:
        schema["items"] = _flat(schema["items"])
    if isinstance(schema.get("additionalProperties"), dict):
        schema["additionalProperties"] = _flat(schema["additionalProperties"])
    if "anyOf" not in schema:
        return schema
    kinds = [_flat(kind) for kind in schema["anyOf"]]
    kinds = [inner for kind in kinds for inner in kind.get("anyOf", [kind])]
    if {} in kinds:
        return {}
    if len(kinds) == 1:
        return kinds[0]
    rest = [kind for kind in kinds if kind != {"type": "null"}]
    if len(rest) < len(kinds) and len(rest) == 1:
        if "enum" in rest[0]:
            return {"enum": [*rest[0]["enum"], None]}
        if rest[0].get("type") in _FLAT:
            return {**rest[0], "type": [rest[0]["type"], "null"]}
    return {**schema, "anyOf": list({str(kind): kind for kind in kinds}.values())}
