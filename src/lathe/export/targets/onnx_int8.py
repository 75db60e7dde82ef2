"""ONNX with integer weights, and integer arithmetic for activations with static ranges."""

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
BLOCKED_OPSET = 21  # the first in which groups of weights can have scales


def export(net: nn.Module, example: Tensor, path: str | Path) -> None:
    """Write one self-contained file of a quantized net that takes batches of any size.

    BatchNorm is folded. Activations are unsigned, weights signed with a scale for each output channel, biases 32-bit,
    so that ONNX Runtime computes fully in integers. Operations without a range, such as attention, norms and pooling,
    stay float.
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
    """Load a file as target=onnx, only on the CPU: the CUDA provider has no integer arithmetic."""
    return load_anywhere(path, threads)
