"""Number formats of a DeepSpeed engine."""

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from lightning.fabric.plugins.precision.utils import _convert_fp_tensor
from lightning.pytorch.plugins.precision import DeepSpeedPrecision, Precision
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn

PRECISIONS = ("32-true", "bf16-mixed", "bf16-true", "16-mixed")


class EnginePrecision(DeepSpeedPrecision):
    """The precision plugin of a DeepSpeed engine.

    bf16-mixed is torch's autocast around float32 parameters, as under every other strategy. bf16-true and 16-mixed are
    DeepSpeed's formats: parameters and gradients have half the width, and the optimizer updates float32 copies that are
    sharded over the ranks. A GradScaler of the run's plugin sets DeepSpeed's initial loss scale and growth interval.
    """

    def __init__(self, plugin: Precision) -> None:
        super().__init__(plugin.precision)  # type: ignore[arg-type]  # checked by the strategy
        scaler = getattr(plugin, "scaler", None)
        self._init_scale = float(scaler.get_scale()) if scaler is not None else 65536.0
        self._growth_interval = int(scaler.get_growth_interval()) if scaler is not None else 2000

    def convert_module(self, module: nn.Module) -> nn.Module:
        narrow = self.precision in ("bf16-true", "16-mixed")
        return module.to(self._desired_dtype) if narrow else module

    def convert_input(self, data: Any) -> Any:
        dtype = torch.float32 if self.precision == "bf16-mixed" else self._desired_dtype
        return apply_to_collection(data, function=_convert_fp_tensor, dtype=Tensor, dst_type=dtype)

    def forward_context(self) -> AbstractContextManager[Any]:
        # for evaluation without an engine; an engine has its own autocast
        if self.precision != "bf16-mixed":
            return nullcontext()
        from deepspeed.accelerator import get_accelerator

        return torch.autocast(get_accelerator().device_name(), dtype=torch.bfloat16)

    def tensor_init_context(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def engine_config(self) -> dict[str, Any]:
        """Return the section of DeepSpeed's configuration for the number format."""
        if self.precision == "bf16-mixed":
            # without "safe" modules, whose gradients would be reduced in bf16, as no other strategy does by default
            return {"torch_autocast": {"enabled": True, "dtype": "bfloat16", "lower_precision_safe_modules": []}}
        if self.precision == "bf16-true":
            return {"bf16": {"enabled": True}}
        if self.precision == "16-mixed":
            return {
                "fp16": {
                    "enabled": True,
                    "loss_scale": 0,  # dynamic
                    "initial_scale_power": round(math.log2(self._init_scale)),
                    "loss_scale_window": self._growth_interval,
                }
            }
        return {}
