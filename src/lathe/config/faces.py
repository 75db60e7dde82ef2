"""Faces of rooms, whose names are imported when they are asked for."""

from collections.abc import Callable
from importlib import import_module
from typing import Any


def lazily(room: str, files: dict[str, str]) -> Callable[[str], Any]:
    """The `__getattr__` of a package whose face has names that few runs need: `files` says in which of its modules each
    stands, and that module is imported when the name is asked for."""

    def get(name: str) -> Any:
        if name not in files:
            raise AttributeError(f"module {room!r} has no attribute {name!r}")
        return getattr(import_module(f"{room}.{files[name]}"), name)

    return get
