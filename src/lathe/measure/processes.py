"""Collectives over the training processes; without a process group there is one process."""

from typing import Any

import torch
from torch import Tensor


def processes() -> int:
    """Return the number of processes."""
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_world_size() if distributed else 1


def everyones(value: Any) -> list[Any]:
    """Return each process's value, in the order of ranks. A collective, which pickles values."""
    each = [value] * processes()
    if len(each) > 1:
        torch.distributed.all_gather_object(each, value)
    return each


def everyones_tensors(tensor: Tensor) -> list[Tensor]:
    """Return each process's tensor; shapes and dtypes must be equal on all."""
    each = [tensor] * processes()
    if len(each) > 1:
        each = [torch.empty_like(tensor) for _ in each]
        torch.distributed.all_gather(each, tensor)
    return each
