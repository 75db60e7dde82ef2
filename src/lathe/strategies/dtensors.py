"""Gather, shard and clip tensors that are sharded over ranks (DTensor).

A checkpoint has full tensors on the CPU and the optimizer's state in torch's format (parameter ids in the order of the
groups), so that a run can resume under any other strategy.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from lightning.pytorch.plugins import Precision
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp, all_reduce
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from lathe.errors import UserError


def local(tensor: Tensor) -> Tensor:
    """Return the local shard of a DTensor; any other tensor unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


# -- state


def full(tensor: Tensor) -> Tensor:
    """Return the full `tensor` on the CPU, detached. Collective if it is sharded."""
    tensor = tensor.detach()
    if isinstance(tensor, DTensor):
        if tensor.to_local().device.type != tensor.device_mesh.device_type:  # offloaded to the CPU
            tensor = tensor.to(tensor.device_mesh.device_type)
        assert isinstance(tensor, DTensor)
        tensor = tensor.full_tensor()
    return tensor.cpu()


def full_tree(tree: Any, keep: bool = True) -> Any:
    """Return a tree of dicts, lists and tuples with every sharded tensor replaced by the full one. Collective.

    Without `keep` they are replaced by empty ones, so that only the writing rank needs the memory. Every rank passes
    the same keys in the same order.
    """
    return tree_map_only(DTensor, lambda leaf: full(leaf) if keep else full(leaf).new_empty(0), tree)


def shard_like(tensor: Tensor, reference: Tensor) -> Tensor:
    """Return a full tensor sharded like `reference`, locally. Unchanged if `reference` is plain or both are alike."""
    if not isinstance(reference, DTensor):
        return tensor
    if isinstance(tensor, DTensor):
        if tensor.device_mesh == reference.device_mesh and tensor.placements == reference.placements:
            return tensor
        tensor = full(tensor)
    spread = distribute_tensor(tensor, reference.device_mesh, reference.placements, src_data_rank=None)
    shard = spread.to_local().to(reference.to_local().device, copy=True)  # a view would keep the full tensor in memory
    return DTensor.from_local(
        shard, spread.device_mesh, spread.placements, run_check=False, shape=spread.shape, stride=spread.stride()
    )


def entry_like(value: Any, parameter: Tensor | None) -> Any:
    """Return an entry of an optimizer's state, sharded like its parameter if the shapes are equal."""
    same = isinstance(value, Tensor) and parameter is not None and value.shape == parameter.shape
    return shard_like(value, parameter) if same else value  # type: ignore[arg-type]


def parameters_by_id(optimizer: Optimizer) -> dict[int, Tensor]:
    """Return an optimizer's parameters by their ids in its `state_dict`."""
    return dict(enumerate(_parameters(optimizer)))


def _parameters(optimizer: Optimizer) -> list[Any]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


# -- gradients


def install_clipping(plugin: Precision, stages: ProcessGroup | None = None, uncounted: Iterable[Tensor] = ()) -> None:
    """Make clipping and the 16-mixed scaler of a precision work on sharded gradients; torch's support only one mesh.

    It replaces methods of `plugin`. The norm is also taken over `stages`, the ranks that each hold a stage of the net;
    `uncounted` are parameters that another stage counts in it.
    """
    own: Any = plugin
    own.clip_grad_by_norm = lambda optimizer, limit: clip_by_norm(_parameters(optimizer), limit, stages, uncounted)
    own.clip_grad_by_value = lambda optimizer, limit: clip_by_value(_parameters(optimizer), limit)
    scaler = getattr(plugin, "scaler", None)
    if scaler is not None:
        scaler._unscale_grads_ = _unscale


def _unscale(
    optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
) -> dict[torch.device, Tensor]:
    """Replace GradScaler's method for local shards. All ranks skip the step if any of them finds an overflow."""
    overflows: dict[torch.device, Tensor] = {}
    by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for _, gradient in _gradients(_parameters(optimizer)):
        shard = local(gradient)
        overflows.setdefault(shard.device, found_inf.to(shard.device, copy=True))
        by_kind.setdefault((shard.device, shard.dtype), []).append(shard)
    for (device, _), gradients in by_kind.items():
        torch._amp_foreach_non_finite_check_and_unscale_(gradients, overflows[device], inv_scale.to(device))
    for flag in overflows.values():
        everywhere = flag.to(found_inf.device)
        all_reduce(everywhere, ReduceOp.MAX)
        flag.copy_(everywhere)
    return overflows


def clip_by_norm(
    parameters: Iterable[Tensor], limit: float, stages: ProcessGroup | None = None, uncounted: Iterable[Tensor] = ()
) -> Tensor:
    """Clip the gradients' global norm to `limit`, as torch's clip_grad_norm_; return the old norm. Collective."""
    gradients, skipped = list(_gradients(parameters)), {id(parameter) for parameter in uncounted}
    norm = global_norm([gradient for parameter, gradient in gradients if id(parameter) not in skipped], stages)
    scale = (limit / (norm + 1e-6)).clamp(max=1.0)
    for _, gradient in gradients:
        shard = local(gradient)
        shard.mul_(scale.to(shard.device, shard.dtype))
    return norm


def clip_by_value(parameters: Iterable[Tensor], limit: float) -> None:
    """Clamp every element of the gradients to [-limit, limit]."""
    for _, gradient in _gradients(parameters):
        local(gradient).clamp_(-limit, limit)


def global_norm(gradients: Iterable[Tensor], stages: ProcessGroup | None = None) -> Tensor:
    """Return the 2-norm over all gradients (0-dim, at least float32, on the CPU). Collective, once for each mesh."""
    meshes: dict[DeviceMesh | None, list[Tensor]] = {}
    for gradient in gradients:
        meshes.setdefault(getattr(gradient, "device_mesh", None), []).append(gradient)
    norms = []
    for members in meshes.values():
        wide = torch.promote_types(members[0].dtype, torch.float32)
        each = [torch.linalg.vector_norm(gradient, dtype=wide) for gradient in members]
        norms.append(full(torch.linalg.vector_norm(torch.stack(each))))
    total = torch.stack(norms) if norms else torch.zeros(1)
    if stages is None:
        return torch.linalg.vector_norm(total)
    squares = total.double().square().sum()
    all_reduce(squares, group=stages)
    return squares.sqrt()


def settle(parameter: Tensor) -> None:
    """Redistribute a sharded gradient like its parameter, such as one that is still a partial sum. Collective."""
    gradient = parameter.grad
    if isinstance(parameter, DTensor) and isinstance(gradient, DTensor) and gradient.placements != parameter.placements:
        parameter.grad = gradient.redistribute(placements=parameter.placements)


def _gradients(parameters: Iterable[Tensor]) -> Iterable[tuple[Tensor, Tensor]]:
    for parameter in parameters:
        settle(parameter)
        if parameter.grad is not None:
            yield parameter, parameter.grad


def reduce_together(parameters: Sequence[Tensor], group: ProcessGroup, divisor: int = 1) -> None:
    """Set gradients to their sum over `group`, divided by `divisor`. Collective.

    A gradient of None counts as zero, and stays None if no rank has one. Every rank passes the same parameters in the
    same order.
    """
    if not parameters:
        return
    missing = [p.grad is None for p in parameters]
    exists = torch.tensor([0.0 if is_missing else 1.0 for is_missing in missing], device=local(parameters[0]).device)
    all_reduce(exists, ReduceOp.MAX, group=group)
    sums = []
    for p in parameters:
        total = local(torch.zeros_like(p) if p.grad is None else p.grad).contiguous()
        sums.append((p, total, all_reduce(total, group=group, async_op=True)))
    # only a rank without a gradient reads the flags, because that synchronizes the GPU
    flags = exists.tolist() if any(missing) else [1.0] * len(parameters)
    for (p, total, work), exists_anywhere in zip(sums, flags, strict=True):
        work.wait()
        if exists_anywhere:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            local(p.grad).copy_(total / divisor)


# -- optimizers


class MixedMeshes:
    """Mixin of a strategy whose optimizers may update parameters of several meshes, which `foreach` does not support.

    `foreach` is disabled then, and is as before in checkpoints, for other strategies.
    """

    name: ClassVar[str]
    optimizers: list[Optimizer]
    _mixed = False

    def setup_optimizers(self, trainer: Any) -> None:
        super().setup_optimizers(trainer)  # type: ignore[misc]
        self._disable_foreach()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        state: dict[str, Any] = super().optimizer_state(optimizer)  # type: ignore[misc]
        if not self._mixed:
            return state
        groups = [{**group, "foreach": None} if "foreach" in group else group for group in state["param_groups"]]
        return {**state, "param_groups": groups}

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        super().load_optimizer_state_dict(checkpoint)  # type: ignore[misc]
        self._disable_foreach()

    def _disable_foreach(self) -> None:
        for optimizer in self.optimizers:
            self._mixed = len({getattr(parameter, "device_mesh", None) for parameter in _parameters(optimizer)}) > 1
            for group in optimizer.param_groups if self._mixed else ():
                key = next((key for key in ("fused", "foreach") if group.get(key)), None)
                if key is not None:
                    raise UserError(
                        f"optimizer.{key}=true does not work with strategy={self.name}, where some parameters are "
                        f"sharded and some are not. Use optimizer.{key}=null."
                    )
                if "foreach" in group:
                    group["foreach"] = False
