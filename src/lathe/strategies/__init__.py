"""How a net is spread over devices, in which number format, and whether it is compiled."""

from typing import TYPE_CHECKING

from lathe.config.lazy_imports import lazy_getattr
from lathe.strategies.compilation import compile_net
from lathe.strategies.memory_format import channels_last
from lathe.strategies.parallel import DDP, auto
from lathe.strategies.precision import precision_plugin
from lathe.strategies.sync_batchnorm import SyncBatchNorm

if TYPE_CHECKING:
    from lathe.strategies.deepspeed.strategy import DeepSpeed
    from lathe.strategies.fsdp import FSDP
    from lathe.strategies.model_split import ModelSplit
    from lathe.strategies.pipeline.strategy import Pipeline
    from lathe.strategies.tensor import TensorParallel
    from lathe.strategies.three_d import ThreeD
    from lathe.strategies.whole_step import WholeStep, compile_task
else:
    __getattr__ = lazy_getattr(
        __name__,
        {
            "DeepSpeed": "deepspeed",
            "FSDP": "fsdp",
            "ModelSplit": "model_split",
            "Pipeline": "pipeline",
            "TensorParallel": "tensor",
            "ThreeD": "three_d",
            "WholeStep": "whole_step",
            "compile_task": "whole_step",
        },
    )

__all__ = [
    "DDP",
    "FSDP",
    "DeepSpeed",
    "ModelSplit",
    "Pipeline",
    "SyncBatchNorm",
    "TensorParallel",
    "ThreeD",
    "WholeStep",
    "auto",
    "channels_last",
    "compile_net",
    "compile_task",
    "precision_plugin",
]
