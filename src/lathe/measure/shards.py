"""Whole tensors and their shards."""

from typing import Any

import torch
from torch import Tensor, nn


def is_sharded(tensor: Tensor) -> bool:
    """Return whether `tensor` is a DTensor, without importing torch.distributed.tensor."""
    return hasattr(tensor, "device_mesh") and hasattr(tensor, "to_local")


def local(tensor: Tensor) -> Tensor:
    """Return this process's shard, detached, in the same memory, possibly empty; a plain tensor as it is."""
    detached: Any = getattr(tensor, "ds_tensor", tensor).detach()
    part: Tensor = detached.to_local() if is_sharded(detached) else detached
    return part


def joined(part: Tensor, like: Tensor) -> Tensor:
    """Return a DTensor of shards `part`, placed like `like`; `part` if `like` is not one. Sends nothing."""
    if not is_sharded(like):
        return part
    from torch.distributed.tensor import DTensor

    assert isinstance(like, DTensor)
    return DTensor.from_local(
        part.detach(), like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def part_of(tensor: Tensor, like: Tensor) -> Tensor:
    """Return this process's shard of `tensor`, which is whole or sharded like `like`. No communication."""
    if is_sharded(tensor) or not is_sharded(like):
        return local(tensor)
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(like, DTensor)
    with torch.no_grad():
        return local(distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)).clone()


def whole(tensor: Tensor) -> Tensor:
    """Return the whole tensor, detached, on every process; a collective for a DTensor."""
    full: Tensor = tensor.detach().full_tensor() if is_sharded(tensor) else tensor.detach()  # type: ignore[attr-defined]
    return full


def parameters_of(net: nn.Module) -> dict[str, Tensor]:
    """Return the parameters of a net by name, resharded (under fsdp) as they are trained."""
    names = {name for name, _ in net.named_parameters()}
    return {name: tensor for name, tensor in net.state_dict(keep_vars=True).items() if name in names}
