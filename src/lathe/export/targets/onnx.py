"""ONNX in float32, for ONNX Runtime and whatever else reads ONNX."""

from pathlib import Path

from torch import Tensor, nn

from lathe.export.deploy import copied
from lathe.export.targets.onnx_graph import available, load, require_packages, write

__all__ = ["available", "computes", "export", "integers", "load", "suffix"]

suffix = ".onnx"
computes = True
integers: bool | None = False


def export(net: nn.Module, example: Tensor, path: str | Path) -> None:
    """Writes one self-contained file that takes batches of any size. `example` is the net's input, `[batch, ...]`; only
    its shape and type are used. The net and its modes stay as they are.

    Of a quantized net, the weights are the values that its integers stand for, and activations are not rounded.

    Raises:
        UserError: a package is missing, or the file can't be written.
    """
    require_packages()
    write(copied(net, floats=True), example, path)
