"""Export targets, one module each: export, load, run."""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, cast

from torch import Tensor, nn

from lathe.config.schema import own_targets
from lathe.errors import UserError

# a target's module is imported only when the target is used
TARGETS = {
    "onnx": "lathe.export.targets.onnx",
    "onnx_int8": "lathe.export.targets.onnx_int8",
    "torch_export": "lathe.export.targets.torch_export",
    "aot_inductor": "lathe.export.targets.aot_inductor",
    "torchscript": "lathe.legacy.torchscript",
    "executorch": "lathe.export.targets.executorch",
    "tensorrt": "lathe.export.targets.tensorrt",
    "torchserve": "lathe.legacy.torchserve",
    "safetensors": "lathe.export.targets.safetensors",
    "weights": "lathe.export.targets.weights",
}
TARGETS = own_targets() | TARGETS


# These files are programs, which run when loaded: machine code, or TorchScript, which PyTorch says to treat as code.
PROGRAMS = ("aot_inductor", "tensorrt", "torchscript", "torchserve")

# Arguments of `export` that are not options: `facts` for the manifest, and `config`, the node that builds the net.
GIVEN = ("facts", "config")


class Target(Protocol):
    """The functions and attributes of each target's module.

    `available` may take options that need more packages. Optional are `made_for(...)`, the manifest's entry for the
    machine that a file with these options is for; a `load` with `device`, a GPU such as `cuda:1`; `complete(folder)`,
    called after the parity comparison, which may add files to the export; and `publish(folder, ...)`, called with its
    options when the folder has its final name.
    """

    suffix: str  # of the file
    computes: bool  # whether `load` returns a function; False for weights, which have `restore(net, path)` instead
    integers: bool | None  # True: only quantized nets; False: only float nets; None: both, as integers or as floats

    def available(self, **options: Any) -> str | None:
        """Return None, or the message that says what to install."""

    def export(self, net: nn.Module, example: Tensor, path: str | Path, **options: Any) -> None:
        """Write the net to `path` atomically; the net and its modes do not change.

        `example` is the net's input `[batch, ...]`, used for its shape and dtype. Options are the keys of the target's
        file in configs/target. Raises UserError if a package is missing, or the net, an option or the disk does not
        allow the export.
        """

    def load(self, path: str | Path, threads: int | None = None) -> Callable[[Any], Any]:
        """Load the file as a function of arrays: from the net's input, `[batch, ...]`, to its output.

        `threads` is the number of threads per call; None is the runtime's default. Raises UserError if the file does
        not exist, or can't be read on this machine.
        """


def get(name: str) -> Target:
    """Return the target `name`."""
    if name not in TARGETS:
        raise UserError(f"target={name} is unknown: choose one of {', '.join(TARGETS)}.")
    return cast(Target, import_module(TARGETS[name]))
