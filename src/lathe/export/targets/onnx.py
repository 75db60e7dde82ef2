"""ONNX in float32, for ONNX Runtime and other readers of ONNX."""

from pathlib import Path

from torch import Tensor, nn

from lathe.export.deploy import copied
from lathe.export.targets.onnx_graph import available, load, require_packages, write

__all__ = ["available", "computes", "export", "integers", "load", "suffix"]

suffix = ".onnx"
computes = True
integers: bool | None = False


def export(net: nn.Module, example: Tensor, path: str | Path) -> None:
    """Write one self-contained file that takes batches of any size.

    A quantized net is written with the float values of its integer weights, and activations are not rounded.

    Raises:
        UserError: a package is missing, or the file can't be written.
    """
    require_packages()
    write(copied(net, floats=True), example, path)
