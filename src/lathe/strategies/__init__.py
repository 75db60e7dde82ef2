"""How a net is spread over devices, in which number format, and whether it is compiled."""

from lathe.strategies.compilation import compile_net
from lathe.strategies.dp import DP
from lathe.strategies.parallel import DDP, auto
from lathe.strategies.precision import precision_plugin
from lathe.strategies.sync_batchnorm import SyncBatchNorm

__all__ = ["DDP", "DP", "SyncBatchNorm", "auto", "compile_net", "precision_plugin"]
