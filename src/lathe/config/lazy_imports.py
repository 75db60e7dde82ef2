"""Lazy imports of the names of a package."""

from collections.abc import Callable
from importlib import import_module
from typing import Any


def lazy_getattr(package: str, modules: dict[str, str]) -> Callable[[str], Any]:
    """Return a `__getattr__` for a package that imports a name's module, by `modules`, at the first access."""

    def get(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{modules[name]}"), name)

    return get
