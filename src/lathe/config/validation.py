"""Check the arguments of a call against the annotations of the function."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from lathe.config.values import NODE, Json, kinds, plain, problem
from lathe.errors import ArgumentError

T = TypeVar("T", bound=Callable[..., Any])


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
        schemas = _schemas(part)
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        values = {key: plain(value) for key, value in given.items() if key in schemas}
        wrong = [_problem(key, value, schemas[key]) for key, value in values.items()]
        if any(wrong):
            raise ArgumentError(*filter(None, wrong))
        return part(*args, **kwargs)

    call.is_validated = True  # type: ignore[attr-defined]  # for scripts/schema.py
    return call  # type: ignore[return-value]


def _problem(key: str, value: Any, schema: Json) -> str | None:
    """Return the sentence for a value that does not fit. Objects stand for the nodes of a file; the function checks
    them itself.
    """
    takes_objects = any(NODE in (kind, kind.get("items")) for kind in kinds(schema))
    return None if takes_objects and _has_object(value) else problem(key, value, schema)


def _has_object(value: Any) -> bool:
    """Tell whether a value is not a group of keys, or has something else than YAML's values in it."""
    return not isinstance(value, dict) or any(map(_is_object, value.values()))


def _is_object(value: Any) -> bool:
    if isinstance(value, (list, dict)):
        return any(map(_is_object, value if isinstance(value, list) else value.values()))
    return not isinstance(value, (bool, int, float, str, type(None)))


@functools.cache
def _schemas(function: Callable[..., Any]) -> dict[str, dict[str, Any]]:
    from lathe.config.signatures import parameter_schemas

    return parameter_schemas(function)
