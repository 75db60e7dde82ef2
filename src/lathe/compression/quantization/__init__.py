"""Quantization of weights and activations: fake quantization, ranges, and post-training methods."""

from .fake_quant import calibrate as calibrate
from .net import LayerPlan as LayerPlan
from .net import describe as describe
from .net import freeze_observers as freeze_observers
from .net import integer_weight as integer_weight
from .net import quantize as quantize
from .net import quantized_layers as quantized_layers
from .net import rebuild as rebuild
from .net import set_enabled as set_enabled
from .net import strip as strip
from .net import update_ranges as update_ranges
from .ptq import quantize_dynamic as quantize_dynamic
from .ptq import quantize_static as quantize_static
from .ptq import quantize_weights as quantize_weights
