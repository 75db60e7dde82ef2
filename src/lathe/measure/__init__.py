"""Every number that a receipt prints: sizes, arithmetic, time."""

from lathe.measure.flops import count_flops
from lathe.measure.memory import PeakMemory, SavedActivations, StateBytes, count_state, tensor_bytes
from lathe.measure.params import ParamCount, count_parameters

__all__ = [
    "ParamCount",
    "PeakMemory",
    "SavedActivations",
    "StateBytes",
    "count_flops",
    "count_parameters",
    "count_state",
    "tensor_bytes",
]
