"""What the processes that train together know of each other; outside a process group there is one: nothing is sent."""

from typing import Any

import torch
from torch import Tensor


def processes() -> int:
    """How many they are."""
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_world_size() if distributed else 1


def everyones(value: Any) -> list[Any]:
    """What each process gives, in the order of ranks; a collective. Values are pickled on their way."""
    each = [value] * processes()
    if len(each) > 1:
        torch.distributed.all_gather_object(each, value)
    return each


def everyones_tensors(tensor: Tensor) -> list[Tensor]:
    """The same of tensors that are alike in shape and dtype on all processes."""
    each = [tensor] * processes()
    if len(each) > 1:
        each = [torch.empty_like(tensor) for _ in each]
        torch.distributed.all_gather(each, tensor)
    return each
