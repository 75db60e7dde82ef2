"""Integers for weights and activations: rounding that trains, ranges, and what is done after training."""

from lathe.compression.quantization.calibration import calibrate
from lathe.compression.quantization.layers import quantized_layers
from lathe.compression.quantization.net import (
    describe,
    freeze_observers,
    integer_weight,
    quantize,
    rebuild,
    set_enabled,
    strip,
    update_ranges,
)
from lathe.compression.quantization.ptq import quantize_dynamic, quantize_static
from lathe.compression.quantization.weight_only import quantize_weights

__all__ = [
    "calibrate",
    "describe",
    "freeze_observers",
    "integer_weight",
    "quantize",
    "quantize_dynamic",
    "quantize_static",
    "quantize_weights",
    "quantized_layers",
    "rebuild",
    "set_enabled",
    "strip",
    "update_ranges",
]
