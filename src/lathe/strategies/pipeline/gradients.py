"""Gradients of parameters that several ranks share, and norms over parameters that several ranks hold together."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

BUCKET = 32 * 2**20  # bytes that travel at once


def local(tensor: Tensor) -> Tensor:
    """This rank's own memory of a tensor that is split among ranks; any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def settle(parameter: nn.Parameter) -> None:
    """A gradient that is split among ranks in another way than its parameter, or still a sum to be made, is from here
    on split alike.
    """
    gradient = parameter.grad
    if isinstance(parameter, DTensor) and isinstance(gradient, DTensor) and gradient.placements != parameter.placements:
        parameter.grad = gradient.redistribute(placements=parameter.placements)


def reduce_together(parameters: list[nn.Parameter], group: dist.ProcessGroup, share: float = 1.0) -> None:
    """Gradients become `share` times their sum over `group`, where None counts as zero; a gradient that nobody has
    stays None.

    Every rank passes the same parameters in the same order.
    """
    for bucket in _buckets(parameters):
        missing = [p.grad is None for p in bucket]
        rows = [local(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in bucket]
        found = torch.tensor([0.0 if none else 1.0 for none in missing], dtype=rows[0].dtype, device=rows[0].device)
        flat = torch.cat([*rows, found])
        dist.all_reduce(flat, group=group)
        *sums, found = flat.split([*(len(row) for row in rows), len(found)])
        # Only who lacks a gradient has to look, which makes a GPU wait.
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
    """Scales gradients so that their norm over all of `group` is at most `limit`, as torch.nn.utils.clip_grad_norm_
    does for one process.

    Args:
        parameters: this rank's.
        limit: the largest norm.
        group: the ranks that hold one replica of the net.
        twice: ids of parameters that another rank counts.
        counts: whether this rank counts what all tensor ranks have in equal copies.
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
    """Clamps each element of each gradient to [-limit, limit]."""
    for p in parameters:
        if p.grad is not None:
            local(p.grad).clamp_(-limit, limit)


def share_overflow(precision: Any) -> None:
    """If one stage's float16 gradients overflow, all stages leave the step out: their loss scales stay equal."""
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
