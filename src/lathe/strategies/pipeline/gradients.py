"""Reductions of shared parameters' gradients, and gradient clipping over the ranks of one replica."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

BUCKET = 32 * 2**20  # bytes per reduction


def local(tensor: Tensor) -> Tensor:
    """Return the local shard of a DTensor; any other tensor unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def settle(parameter: nn.Parameter) -> None:
    """Redistribute a gradient to its parameter's placements."""
    gradient = parameter.grad
    if isinstance(parameter, DTensor) and isinstance(gradient, DTensor) and gradient.placements != parameter.placements:
        parameter.grad = gradient.redistribute(placements=parameter.placements)


def reduce_together(parameters: list[nn.Parameter], group: dist.ProcessGroup, share: float = 1.0) -> None:
    """Set gradients to `share` times their sum over `group`. Collective.

    A gradient of None counts as zero, and stays None if no rank has one. Every rank passes the same parameters in the
    same order.
    """
    for bucket in _buckets(parameters):
        missing = [p.grad is None for p in bucket]
        rows = [local(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in bucket]
        found = torch.tensor([0.0 if none else 1.0 for none in missing], dtype=rows[0].dtype, device=rows[0].device)
        flat = torch.cat([*rows, found])
        dist.all_reduce(flat, group=group)
        *sums, found = flat.split([*(len(row) for row in rows), len(found)])
        # only a rank without a gradient reads the flags, because that synchronizes the GPU
        exists = found.tolist() if any(missing) else [1.0] * len(bucket)
        for p, total, some in zip(bucket, sums, exists, strict=True):
            if some:
                if p.grad is None:
                    p.grad = torch.zeros_like(p)
                own = local(p.grad)
                own.copy_((total if share == 1.0 else total * share).view_as(own))


def _buckets(parameters: list[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    kinds: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
    for p in parameters:
        kinds.setdefault((p.dtype, p.device), []).append(p)
    for members in kinds.values():
        bucket: list[nn.Parameter] = []
        size = 0
        for p in members:
            bucket.append(p)
            size += local(p).numel() * p.element_size()
            if size >= BUCKET:
                yield bucket
                bucket, size = [], 0
        if bucket:
            yield bucket


def clip_by_norm(
    parameters: list[Tensor], limit: float, group: dist.ProcessGroup, twice: set[int], counts: bool
) -> None:
    """Scale gradients to a norm over `group` of at most `limit`, as torch's clip_grad_norm_. Collective.

    Args:
        parameters: this rank's parameters.
        limit: the largest norm.
        group: the ranks of one replica of the net.
        twice: ids of parameters that another rank counts.
        counts: whether this rank counts the tensors that all tensor ranks replicate.
    """
    gradients = [(p, p.grad) for p in parameters if p.grad is not None]
    squares = []
    for p, gradient in gradients:
        split = isinstance(gradient, DTensor) and any(placement.is_shard() for placement in gradient.placements)
        if id(p) not in twice and (split or counts):
            own = local(gradient)
            norm = torch.linalg.vector_norm(own, dtype=torch.promote_types(own.dtype, torch.float32))
            squares.append(norm.double().square())
    device = parameters[0].device if parameters else torch.device("cpu")
    total = torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64, device=device)
    dist.all_reduce(total, group=group)
    factor = (limit / (total.sqrt() + 1e-6)).clamp(max=1.0)
    for _, gradient in gradients:
        own = local(gradient)
        own.mul_(factor.to(own.dtype))


def clip_by_value(parameters: list[Tensor], limit: float) -> None:
    """Clamp each element of each gradient to [-limit, limit]."""
    for p in parameters:
        if p.grad is not None:
            local(p.grad).clamp_(-limit, limit)


def share_overflow(precision: Any) -> None:
    """Make all stages skip the step if float16 gradients of one overflow: loss scales stay equal."""
    scaler = getattr(precision, "scaler", None)
    if scaler is None:
        return
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    if not isinstance(scaler, ShardedGradScaler):
        state = scaler.state_dict()
        shared = ShardedGradScaler(
            scaler._device,
            init_scale=state["scale"],
            growth_factor=state["growth_factor"],
            backoff_factor=state["backoff_factor"],
            growth_interval=state["growth_interval"],
        )
        shared.load_state_dict(state)
        precision.scaler = shared
