"""Parts held against their tables when they are built from Python too."""

import functools
import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Integral, Real
from typing import Any, TypeVar

from lathe.config.schema.check import CLASSES
from lathe.config.schema.optim import OPTIMIZER, OPTIMIZERS
from lathe.config.schema.rule import Rule
from lathe.config.schema.strategies import COMPILE, PRECISION
from lathe.config.schema.targets import TARGETS
from lathe.errors import ArgumentError

TABLES: dict[str, dict[str, Rule]] = {
    **CLASSES,
    **{name: {key: OPTIMIZER[key] for key in ("lr", "weight_decay")} | own for name, own in OPTIMIZERS.items()},
    **{f"target.{name}": options for name, options in TARGETS.items()},
    "compile": COMPILE,
    "precision": PRECISION,
}
T = TypeVar("T", bound=Callable[..., Any])


def held(name: str, *free: str) -> Callable[[T], T]:
    """Decorates a class or a function: a call is refused if an argument is not what the table of `name` says, a class,
    a target as `target.onnx`, or the group `compile` or `precision`. Subclasses hand their arguments on to the class's
    own constructor, and so are held as well. `free` arguments take more in Python than in a file.

    Raises, when it is called:
        ArgumentError: with a sentence for each argument that is wrong.
    """
    rules = {key: rule for key, rule in TABLES[name].items() if key not in free}

    def decorate(part: T) -> T:
        function: Any = part.__init__ if isinstance(part, type) else part  # type: ignore[misc]
        parameters = inspect.signature(function).parameters
        names, takes_any = list(parameters), any(one.kind is one.VAR_KEYWORD for one in parameters.values())

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            given = {**dict(zip(names, args, strict=False)), **kwargs}
            if not takes_any:
                given = {key: value for key, value in given.items() if key in parameters}
            wrong = list(_wrong(given))
            if wrong:
                raise ArgumentError(*wrong)
            return function(*args, **kwargs)

        if isinstance(part, type):
            part.__init__ = call  # type: ignore[misc]
            return part
        return call  # type: ignore[return-value]

    def _wrong(given: Mapping[str, Any]) -> Iterator[str]:
        for key, value in given.items():
            rule = rules.get(key)
            built = (
                rule is not None and any(one.kind == "node" for one in rule.kinds()) and not isinstance(value, Mapping)
            )
            if rule is not None and not built and not rule.fits(value):  # most values are plain already
                sentence = rule.sentence(key, _plain(value))
                if sentence is not None:
                    yield sentence

    return decorate


def _plain(value: Any) -> Any:
    """A value as YAML would have it: tuples and OmegaConf's lists as lists, NumPy's numbers as Python's."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(item) for item in value]
    if isinstance(value, Integral) and not isinstance(value, bool):
        return int(value)
    if isinstance(value, Real) and not isinstance(value, (bool, float)):
        return float(value)
    return os.fspath(value) if isinstance(value, os.PathLike) else value
