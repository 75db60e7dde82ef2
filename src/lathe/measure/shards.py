"""What of a tensor this process holds: the whole of it, or a shard."""

from typing import Any

import torch
from torch import Tensor, nn


def is_sharded(tensor: Tensor) -> bool:
    """Whether `tensor` is a DTensor, which is spread over a mesh of processes. Needs no import of
    torch.distributed.tensor.
    """
    return hasattr(tensor, "device_mesh") and hasattr(tensor, "to_local")


def local(tensor: Tensor) -> Tensor:
    """The part that this process holds, detached, in the same memory; a plain tensor is its own part, a DTensor's may
    be empty.

    A parameter of DeepSpeed's ZeRO stage 3 is empty between its uses; its part is the partition that DeepSpeed keeps
    beside it.
    """
    detached: Any = getattr(tensor, "ds_tensor", tensor).detach()
    part: Tensor = detached.to_local() if is_sharded(detached) else detached
    return part


def joined(part: Tensor, like: Tensor) -> Tensor:
    """The tensor of which each process holds a `part` that is placed as its part of `like`: a DTensor where `like` is
    one, else the part itself. Nothing is sent.
    """
    if not is_sharded(like):
        return part
    from torch.distributed.tensor import DTensor

    assert isinstance(like, DTensor)
    return DTensor.from_local(
        part.detach(), like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def part_of(tensor: Tensor, like: Tensor) -> Tensor:
    """This process's part of `tensor`, which every process holds whole or which is spread as `like` is. Nothing is
    sent.
    """
    if is_sharded(tensor) or not is_sharded(like):
        return local(tensor)
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(like, DTensor)
    with torch.no_grad():
        return local(distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)).clone()


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, detached, on every process: a collective where it is a DTensor."""
    full: Tensor = tensor.detach().full_tensor() if is_sharded(tensor) else tensor.detach()  # type: ignore[attr-defined]
    return full


def parameters_of(net: nn.Module) -> dict[str, Tensor]:
    """The parameters of a net by name, spread as they are trained: under fsdp, `state_dict` puts those that are
    gathered back into shards.
    """
    names = {name for name, _ in net.named_parameters()}
    return {name: tensor for name, tensor in net.state_dict(keep_vars=True).items() if name in names}
