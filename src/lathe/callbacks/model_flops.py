"""Count the operations of a training step on a copy of the net on the meta device."""

import copy
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn

from lathe.measure.flops import count_flops

_DTYPES = {"16": torch.float16, "bf16": torch.bfloat16, "32": torch.float32}


def without_memory(net: nn.Module) -> nn.Module | None:
    """Return a copy of `net` on the meta device, without copying parameters and buffers."""
    tensors = [*net.parameters(), *net.buffers()]
    memo: dict[int, Any] = {}
    for tensor in tensors:
        empty = torch.empty_like(tensor, device="meta")
        memo[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
    try:
        return copy.deepcopy(net, memo)
    except Exception as error:
        rank_zero_warn(f"throughput/mfu is left out: the net can't be copied to count its operations ({error}).")
        return None


def step_flops(twin: nn.Module, x: Tensor) -> float:
    """Return the FLOPs of a training step on the batch `x`; 0 with a warning if they can't be counted."""
    try:
        return 3.0 * count_flops(twin, x[:1].to("meta")) * len(x)
    except Exception as error:
        rank_zero_warn(
            f"throughput/mfu is left out: the net's operations can't be counted ({type(error).__name__}: {error})."
        )
        return 0.0


def compute_dtype(trainer: Trainer) -> torch.dtype:
    # "transformer-engine" and "64-true" have no column in the table of peaks.
    return _DTYPES.get(str(trainer.precision).split("-")[0], torch.float64)
