"""Ways to ship a net, one file per target: export, load, run."""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, cast

from torch import Tensor, nn

from lathe.errors import UserError

# A file's module is only imported when its target is asked for.
TARGETS = {
    "onnx": "lathe.export.onnx",
    "onnx_int8": "lathe.export.onnx_int8",
    "aot_inductor": "lathe.export.aot_inductor",
    "weights": "lathe.export.weights",
}


class Target(Protocol):
    """What each target's file has."""

    suffix: str

    def available(self) -> str | None:
        """None, or the sentence that says what to install."""

    def export(self, net: nn.Module, example: Tensor, path: str | Path) -> None:
        """Writes the net to `path`, whole or not at all; `example` is its input `[batch, ...]`."""

    def load(self, path: str | Path, threads: int | None = None) -> Callable[[Any], Any]:
        """What was written, as a function of arrays."""


def get(name: str) -> Target:
    """The target `name`.

    Raises:
        UserError: there is none of that name.
    """
    if name not in TARGETS:
        raise UserError(f"target={name} is unknown: choose one of {', '.join(TARGETS)}.")
    return cast(Target, import_module(TARGETS[name]))
