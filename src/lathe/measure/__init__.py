"""Every number that a receipt prints: sizes, arithmetic, time."""

from lathe.measure.flops import count_flops
from lathe.measure.params import ParamCount, count_parameters

__all__ = ["ParamCount", "count_flops", "count_parameters"]
