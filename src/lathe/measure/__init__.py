"""Every number that a receipt prints: sizes, arithmetic, time."""

from lathe.measure.agreement import Agreement, AgreementMeter
from lathe.measure.files import FileSize, file_size
from lathe.measure.flops import count_flops
from lathe.measure.hardware import describe_cpu, describe_gpu, usable_cores, versions
from lathe.measure.latency import Latency, interleaved, verdict
from lathe.measure.macs import LayerMacs, Macs, count_macs
from lathe.measure.memory import PeakMemory, SavedActivations, StateBytes, count_state, tensor_bytes
from lathe.measure.params import ParamCount, count_parameters

__all__ = [
    "Agreement",
    "AgreementMeter",
    "FileSize",
    "Latency",
    "LayerMacs",
    "Macs",
    "ParamCount",
    "PeakMemory",
    "SavedActivations",
    "StateBytes",
    "count_flops",
    "count_macs",
    "count_parameters",
    "count_state",
    "describe_cpu",
    "describe_gpu",
    "file_size",
    "interleaved",
    "tensor_bytes",
    "usable_cores",
    "verdict",
    "versions",
]
