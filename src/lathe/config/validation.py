"""The signature is the schema: read it from annotations, and check the arguments of a call against it."""

import collections.abc
import functools
import inspect
import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from lathe.config.values import NODE, Json, kinds, plain, problem
from lathe.errors import ArgumentError

T = TypeVar("T", bound=Callable[..., Any])
PLAIN = (bool, int, float, str, list, dict, tuple, type(None), Path)
_FLAT = ("integer", "number", "boolean", "string", "null")


def validated(part: T) -> T:
    """Decorate a function, a constructor or a dataclass: check the arguments of each call.

    Parameters whose annotation is a class of objects, such as `nn.Module`, are not checked. Lists may be tuples, and
    numbers NumPy's. The schemas are made at the first call.

    Raises, when it is called:
        ArgumentError: with a sentence for each argument that does not fit its annotation.
    """
    if isinstance(part, type):  # a dataclass
        part.__init__ = validated(part.__init__)  # type: ignore[misc]
        return part
    names = list(inspect.signature(part).parameters)

    @functools.wraps(part)
    def call(*args: Any, **kwargs: Any) -> Any:
        schemas, wrong = parameter_schemas(part), []
        arguments = {**dict(zip(names, args, strict=False)), **kwargs}
        for key, schema in ((key, schemas[key]) for key in arguments if key in schemas):
            value = plain(arguments[key])
            takes_nodes = any(NODE in (kind, kind.get("items")) for kind in kinds(schema))
            if takes_nodes and (not isinstance(value, dict) or any(map(_is_object, value.values()))):
                continue  # objects stand for the nodes of a file; the function checks them itself
            if message := problem(key, value, schema):
                wrong.append(message)
        if wrong:
            raise ArgumentError(*wrong)
        return part(*args, **kwargs)

    call.is_validated = True  # type: ignore[attr-defined]  # for scripts/schema.py
    return call  # type: ignore[return-value]


def _is_object(value: Any) -> bool:
    if isinstance(value, (list, dict)):
        return any(map(_is_object, value if isinstance(value, list) else value.values()))
    return not isinstance(value, (bool, int, float, str, type(None)))


@functools.cache
def parameter_schemas(part: Callable[..., Any]) -> dict[str, Json]:
    """Return the schema of each parameter of a function or constructor, in order; {} where any object is taken.

    A constructor with `**options` has the parameters of its base classes too, but for the class's `fixed_parameters`,
    and of a TypedDict that `Unpack`s there.
    """
    schemas: dict[str, Json] = {}
    functions = [part]
    if inspect.isclass(part):
        functions = [vars(base)["__init__"] for base in part.__mro__[:-1] if "__init__" in vars(base)]
    for function in map(inspect.unwrap, functions):
        hints = typing.get_type_hints(function, include_extras=True)
        parameters = inspect.signature(function).parameters
        for name, parameter in parameters.items():
            hint = hints.get(name, parameter.annotation)
            if parameter.kind is parameter.VAR_KEYWORD:
                if typing.get_origin(hint) is typing.Unpack:
                    options = typing.get_type_hints(typing.get_args(hint)[0], include_extras=True)
                    schemas.update({key: schema_of(value) for key, value in options.items()})
            elif name != "self" and parameter.kind is not parameter.VAR_POSITIONAL:
                schemas.setdefault(name, schema_of(hint))
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            break
    fixed = getattr(part, "fixed_parameters", ())
    return {name: schema for name, schema in schemas.items() if name not in fixed}


def schema_of(annotation: Any) -> Json:
    """Return the JSON Schema of an annotation: {} for Any, NODE for a class of objects.

    A union's tensors are left out: `float | Tensor` is a number in a file.
    """
    from pydantic import PydanticUserError, TypeAdapter  # takes 0.1 s to import, at the first call that is checked
    from pydantic.errors import PydanticInvalidForJsonSchema, PydanticSchemaGenerationError

    if annotation is inspect.Parameter.empty or annotation is Any or isinstance(annotation, str):
        return {}
    arms = typing.get_args(annotation) if typing.get_origin(annotation) in (typing.Union, types.UnionType) else ()
    if arms:
        return _flat({"anyOf": [schema_of(arm) for arm in arms if getattr(arm, "__name__", "") != "Tensor"]})
    if inspect.isclass(annotation) and annotation not in PLAIN and typing.get_origin(annotation) is None:
        return NODE
    try:
        return _flat(TypeAdapter(annotation).json_schema())
    except (PydanticUserError, PydanticSchemaGenerationError, PydanticInvalidForJsonSchema):
        origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
        if origin in (list, collections.abc.Sequence):
            return {"type": "array", "items": schema_of(arguments[0])}
        return NODE if origin is collections.abc.Callable else {}


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
