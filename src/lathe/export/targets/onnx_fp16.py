"""ONNX with weights and arithmetic in float16."""

from pathlib import Path
from typing import Any

from torch import nn

from lathe.export import export_target
from lathe.export.bundle import whole
from lathe.export.targets.onnx import Onnx


@export_target("onnx_fp16")
class OnnxFp16(Onnx):
    """The file of target=onnx in half of its bytes, with the same inputs and outputs.

    Numbers outside of float16's range, such as weights below 6e-8, are moved to its ends. ONNX Runtime computes in
    float16 on GPUs; on most CPUs it converts to float32 and back, which takes longer than target=onnx.
    """

    half = True

    def export(self, net: nn.Module, example: Any, path: str | Path) -> None:
        import onnx
        from onnxruntime.transformers.float16 import convert_float_to_float16  # type: ignore[import-untyped,import-not-found,unused-ignore]

        super().export(net, example, path)
        model = convert_float_to_float16(onnx.load(path), keep_io_types=True)
        with whole(path) as temporary:
            onnx.save(model, temporary)
