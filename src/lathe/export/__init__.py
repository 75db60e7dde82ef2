"""Ways to ship a net, one file per target: export, load, run."""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, cast

from torch import Tensor, nn

from lathe.config.schema import own_targets
from lathe.errors import UserError

# A file's module is only imported when its target is asked for.
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


# Files of these are programs, which run when they are loaded: machine code, or TorchScript, which PyTorch asks to treat
# as code.
PROGRAMS = ("aot_inductor", "tensorrt", "torchscript", "torchserve")

# Arguments of `export` that are no options: the verb gives them to targets that take them. `facts` is what the manifest
# will say, `config` the node of the configuration that builds the net.
GIVEN = ("facts", "config")


class Target(Protocol):
    """What each target's file has.

    Its `available` may take options, which may need more. It may also have `made_for(...)`, which gives what the
    manifest says of the machine that a file with these options holds for; a `load` with `device`, the GPU that it is to
    run on, such as `cuda:1`; `complete(folder)`, called once the export in `folder` has passed its comparison, which
    may add files to it; and `publish(folder, ...)`, called with those options that it takes once the folder has its
    final name.
    """

    suffix: str  # of its file
    computes: bool  # whether `load` gives a function; False for weights alone, which have `restore(net, path)` instead
    integers: (
        bool | None
    )  # True: takes quantized nets alone; False: float nets alone; None: both, as integers and as floats

    def available(self, **options: Any) -> str | None:
        """None, or the sentence that says what to install."""

    def export(self, net: nn.Module, example: Tensor, path: str | Path, **options: Any) -> None:
        """Writes the net to `path`, whole or not at all; `example` is its input `[batch, ...]`. Options are the keys of
        the target's file in configs/target."""

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
