"""Export formats: a target is a class that writes a net to a file and opens the file as a function of arrays."""

from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np
from torch import nn

from lathe.config.schema import own_targets, targets_in
from lathe.errors import UserError

Array = np.ndarray[Any, Any]
# The module of each target, which is imported only when the target is used.
TARGETS = own_targets() | targets_in(Path(__file__).parents[2], "lathe/export/targets", "lathe/contrib")
_CLASSES: dict[str, "type[Target]"] = {}
T = TypeVar("T", bound="type[Target]")


class Target:
    """Base class of export targets: what is not overridden here is optional.

    The constructor takes the keys of the target's file in configs/target. `integers` is one of them if a target takes
    quantized nets and others: None writes the net as it was trained, True calibrates one that is not quantized, False
    writes a quantized one with the float values of its weights.
    """

    suffix: ClassVar[str]  # of the file
    computes: ClassVar[bool] = True  # False for weights, which have `restore` instead of `load`
    is_program: ClassVar[bool] = False  # whether loading a file runs code of it: machine code, or TorchScript
    has_gpu: ClassVar[bool] = False  # whether `load` takes a GPU
    half: bool = False  # whether the file computes in float16, whose tolerance is larger
    takes_cores: ClassVar[bool] = False  # whether `export` takes a `FlatCore`, the core of a LightningModule
    integers: bool | None = None
    # set by scripts/export.py before `export`: the manifest's entries, and the configuration's node of the net
    facts: Mapping[str, Any] = {}  # replaced, not changed
    config: Mapping[str, Any] | None = None

    def __init__(self, integers: bool | None = None) -> None:
        self.integers = integers

    def available(self) -> str | None:
        """Return None, or the message that says what to install."""
        return None

    def export(self, net: nn.Module, example: Any, path: str | Path) -> None:
        """Write the net to `path` atomically; the net and its modes do not change.

        `example` is the net's input `[batch, ...]`, used for its shape and dtype; for a `FlatCore` a tuple of its
        inputs. Raises UserError if the net, an option or the disk does not allow the export.
        """
        raise NotImplementedError

    def load(self, path: str | Path, threads: int | None = None, device: str | None = None) -> Callable[..., Any]:
        """Load the file as a function of arrays: from the net's input, `[batch, ...]`, to its output.

        A core has an argument for each of its inputs; several outputs come in a list.

        `threads` is the number of threads per call; None is the runtime's default. `device` is a GPU such as `cuda:1`,
        only for targets that `has_gpu`. Raises UserError if the file can't be read on this machine.
        """
        raise UserError(f"{path} holds weights alone: use restore(net, path), or another target.")

    def restore(self, net: nn.Module, path: str | Path) -> nn.Module:
        """Give `net`, as its configuration builds it, a file's structure and weights, in place; return it."""
        raise NotImplementedError

    def machine(self) -> dict[str, Any]:
        """Return the manifest's entry for the machine that the file is for."""
        return {}

    def complete(self, folder: Path) -> None:
        """Add files to the export after its comparison."""

    def publish(self, folder: Path) -> None:
        """Upload the export, when its folder has the final name."""


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its class if it has none."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:200].rstrip(":. ") if lines else type(error).__name__


def export_target(name: str) -> Callable[[T], T]:
    """Register a class as the target `name`."""

    def register(kind: T) -> T:
        _CLASSES[name] = kind
        return kind

    return register


def get(name: str, **options: Any) -> Target:
    """Return the target `name` with its options, the keys of its file in configs/target."""
    if name not in TARGETS:
        raise UserError(f"target={name} is unknown: choose one of {', '.join(TARGETS)}.")
    import_module(TARGETS[name])
    return _CLASSES[name](**options)
