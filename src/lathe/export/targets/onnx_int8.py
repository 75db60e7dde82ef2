"""ONNX with integer weights, and integer arithmetic where the ranges of activations are known: ranges are those of
training or calibration, weights the integers that training simulated."""

from collections.abc import Callable
from pathlib import Path

from torch import Tensor, nn

from lathe.export.calls import Array
from lathe.export.deploy import IntegerAdd, deployable
from lathe.export.dialects import Onnx
from lathe.export.inputs import stand_in
from lathe.export.targets.onnx_graph import FLOAT_ARITHMETIC, available, require_packages, write
from lathe.export.targets.onnx_graph import load as load_anywhere

__all__ = ["available", "computes", "export", "integers", "load", "suffix"]

suffix = ".onnx"
computes = True
integers: bool | None = True
BLOCKED_OPSET = 21  # the first in which groups of weights have their own scale


def export(net: nn.Module, example: Tensor, path: str | Path) -> None:
    """Writes one self-contained file of a quantized net (`lathe.compression.quantization`) that takes batches of any
    size. `example` is the net's input, `[batch, ...]`; only its shape and type are used. The net and its modes stay as
    they are.

    BatchNorm is folded. Activations are unsigned, weights signed with a scale for each output channel, biases 32 bits:
    what ONNX Runtime computes in integers from end to end. What has no range, such as attention, norms and pooling,
    stays float.

    Raises:
        UserError: no layer is quantized, a package is missing, or the file can't be written.
    """
    require_packages()
    found = deployable(net, stand_in(example), Onnx())
    layers = [module for module in found.modules() if hasattr(module, "integers")]
    blocked = any(layer.scale.dim() == 2 for layer in layers)  # type: ignore[operator]
    rounds = any(
        getattr(module, "source", None) is not None or isinstance(module, IntegerAdd) for module in found.modules()
    )
    properties = {} if rounds else {FLOAT_ARITHMETIC: "1"}
    write(found, example, path, BLOCKED_OPSET if blocked else None, properties)


def load(path: str | Path, threads: int | None = None) -> Callable[[Array], Array]:
    """As of target=onnx, on the CPU alone: the CUDA provider has no arithmetic in integers."""
    return load_anywhere(path, threads)
