"""Gradient clipping for nets that mix plain gradients with DTensors on one or several meshes."""

from collections.abc import Iterable
from typing import Any

import torch
from lightning.pytorch.plugins import Precision
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.optim import Optimizer


def install_clipping(plugin: Precision) -> None:
    """Make clipping and the 16-mixed scaler work on sharded gradients; torch's support only one mesh."""
    plugin.clip_grad_by_norm = _by_norm  # type: ignore[method-assign]
    plugin.clip_grad_by_value = _by_value  # type: ignore[method-assign]
    scaler = getattr(plugin, "scaler", None)
    if scaler is not None:
        scaler._unscale_grads_ = _unscale


def _unscale(
    optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
) -> dict[torch.device, Tensor]:
    """Replace GradScaler's method for local shards. All ranks skip the step if any of them finds an overflow."""
    found: dict[torch.device, Tensor] = {}
    by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for gradient in _gradients(_parameters(optimizer)):
        local = _local(gradient)
        found.setdefault(local.device, found_inf.to(local.device, copy=True))
        by_kind.setdefault((local.device, local.dtype), []).append(local)
    for (device, _), locals_ in by_kind.items():
        torch._amp_foreach_non_finite_check_and_unscale_(locals_, found[device], inv_scale.to(device))
    for flag in found.values():
        everywhere = flag.to(found_inf.device)
        torch.distributed.all_reduce(everywhere, torch.distributed.ReduceOp.MAX)
        flag.copy_(everywhere)
    return found


def _by_norm(optimizer: Optimizer, clip_val: int | float) -> None:
    clip_by_norm(_parameters(optimizer), float(clip_val))


def _by_value(optimizer: Optimizer, clip_val: int | float) -> None:
    clip_by_value(_parameters(optimizer), float(clip_val))


def clip_by_norm(parameters: Iterable[Tensor], limit: float) -> Tensor:
    """Clip the gradients' global norm to `limit`, as torch's clip_grad_norm_. Collective. Returns the old norm."""
    gradients = list(_gradients(parameters))
    norm = global_norm(gradients)
    scale = (limit / (norm + 1e-6)).clamp(max=1.0)
    for local in map(_local, gradients):
        local.mul_(scale.to(local.device, local.dtype))
    return norm


def clip_by_value(parameters: Iterable[Tensor], limit: float) -> None:
    """Clamp every element of the gradients to [-limit, limit]."""
    for local in map(_local, _gradients(parameters)):
        local.clamp_(-limit, limit)


def global_norm(gradients: Iterable[Tensor]) -> Tensor:
    """Return the 2-norm over all gradients (0-dim, at least float32). Collective, once per kind of sharding."""
    kinds: dict[tuple[DeviceMesh | None, tuple[int, ...]], list[Tensor]] = {}
    for gradient in gradients:
        mesh: DeviceMesh | None = None
        axes: tuple[int, ...] = ()
        if isinstance(gradient, DTensor):
            mesh = gradient.device_mesh
            axes = tuple(i for i, placement in enumerate(gradient.placements) if not isinstance(placement, Replicate))
        kinds.setdefault((mesh, axes), []).append(gradient)
    squares = []
    for (where, spread), alike in kinds.items():
        locals_ = [_local(gradient) for gradient in alike]
        # a rank's shard of a small parameter may be empty
        wide = torch.promote_types(locals_[0].dtype, torch.float32)
        norms = [torch.linalg.vector_norm(x, dtype=wide) for x in locals_ if x.numel()]
        total = torch.stack(norms).square().sum() if norms else torch.zeros((), dtype=wide, device=locals_[0].device)
        if where is not None:
            total = total.to(where.device_type)
            for axis in spread:
                torch.distributed.all_reduce(total, group=where.get_group(axis))
        squares.append(total)
    if not squares:
        return torch.zeros(())
    return torch.stack([square.to(squares[0].device) for square in squares]).sum().sqrt()


def reduce_partial(parameter: Tensor) -> None:
    """Reduce a parameter's gradient over the ranks if its placement is still `Partial`."""
    gradient = parameter.grad
    if isinstance(gradient, DTensor) and any(isinstance(placement, Partial) for placement in gradient.placements):
        placements = [Replicate() if isinstance(placement, Partial) else placement for placement in gradient.placements]
        parameter.grad = gradient.redistribute(placements=placements)


def _gradients(parameters: Iterable[Tensor]) -> Iterable[Tensor]:
    for parameter in parameters:
        reduce_partial(parameter)
        if parameter.grad is not None:
            yield parameter.grad


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _parameters(optimizer: Optimizer) -> list[Any]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
