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
    """Write one self-contained float file for any batch size; a quantized net keeps only rounded weights."""
    require_packages()
    write(copied(net, floats=True), example, path)
