"""Converts between sharded tensors and the plain tensors of a checkpoint file.

A checkpoint has full tensors on the CPU and the optimizer's state in torch's format (parameter ids in the order of the
groups), so that a run can resume under any other strategy.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer


def full(tensor: Tensor) -> Tensor:
    """Return the full `tensor` on the CPU, detached. Collective if it is sharded."""
    tensor = tensor.detach()
    if isinstance(tensor, DTensor):
        mesh_type = tensor.device_mesh.device_type
        spread = (
            tensor if tensor.to_local().device.type == mesh_type else tensor.to(mesh_type)
        )  # offloaded: the CPU mesh has no collectives
        assert isinstance(spread, DTensor)
        tensor = spread.full_tensor()
    return tensor.cpu()


def full_tree(tree: Any, keep: bool = True) -> Any:
    """Return a tree of dicts, lists and tuples with every sharded tensor replaced by the full one. Collective.

    Without `keep` they are replaced by empty ones, so that only the writing rank needs the memory. Every rank passes
    the same keys in the same order.
    """

    def gather(leaf: Tensor, path: tuple[Any, ...]) -> Tensor:
        whole = full(leaf)
        return whole if keep else whole.new_empty(0)

    return map_spread(tree, gather)


def map_spread(tree: Any, function: Callable[[DTensor, tuple[Any, ...]], Any], path: tuple[Any, ...] = ()) -> Any:
    """Return `tree` with each sharded tensor replaced by `function(leaf, path of keys)`, in order."""
    if isinstance(tree, DTensor):
        return function(tree, path)
    if isinstance(tree, Mapping):
        return {key: map_spread(value, function, (*path, key)) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(map_spread(value, function, (*path, index)) for index, value in enumerate(tree))
    return tree


def spread_like(tensor: Tensor, reference: Tensor) -> Tensor:
    """Return a full tensor sharded like `reference`, locally. Unchanged if `reference` is plain or both are alike."""
    if not isinstance(reference, DTensor):
        return tensor
    if isinstance(tensor, DTensor):
        same = tensor.device_mesh == reference.device_mesh and tensor.placements == reference.placements
        if same:
            return tensor
        tensor = full(tensor)
    spread = distribute_tensor(tensor, reference.device_mesh, reference.placements, src_data_rank=None)
    local = spread.to_local().to(reference.to_local().device, copy=True)  # a view would keep the full tensor in memory
    return DTensor.from_local(
        local, spread.device_mesh, spread.placements, run_check=False, shape=spread.shape, stride=spread.stride()
    )


def load_full_state_dict(module: nn.Module, state: Mapping[str, Tensor], strict: bool = True) -> None:
    """Load full tensors into a module whose parameters may be sharded, as `module.load_state_dict`."""
    own = module.state_dict()
    module.load_state_dict(
        {name: spread_like(value, own[name]) if name in own else value for name, value in state.items()}, strict=strict
    )


def full_optimizer_state(optimizer: Optimizer) -> dict[str, Any]:
    """Return the `optimizer.state_dict()` of a single process. Collective."""
    state: dict[str, Any] = full_tree(optimizer.state_dict())
    return state


def load_full_optimizer_state(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Load a single process's optimizer state; entries of a parameter's shape are sharded like it."""
    by_id = parameters_by_id(optimizer)
    entries = {
        number: {name: _own(value, by_id.get(number)) for name, value in entry.items()}
        for number, entry in state["state"].items()
    }
    optimizer.load_state_dict({**state, "state": entries})


def parameters_by_id(optimizer: Optimizer) -> dict[int, Tensor]:
    """Return an optimizer's parameters by their ids in its `state_dict`."""
    return dict(enumerate(parameter for group in optimizer.param_groups for parameter in group["params"]))


def _own(value: Any, parameter: Tensor | None) -> Any:
    """Return a copy of an entry, sharded like its parameter if the shapes are equal."""
    if not isinstance(value, Tensor):
        return value
    spread = spread_like(value, parameter) if parameter is not None and value.shape == parameter.shape else value
    return spread.clone() if spread is value else spread


def held_bytes(tensors: list[Tensor]) -> int:
    """Return the bytes of these tensors on this rank; repeated tensors count once."""
    local = {id(t): t.to_local() if isinstance(t, DTensor) else t for t in tensors}
    return sum(t.numel() * t.element_size() for t in local.values() if not t.is_meta)


def held_by(module: nn.Module, optimizer: Optimizer | None = None) -> int:
    """Return the bytes of parameters, buffers and optimizer state on this rank."""
    tensors: list[Tensor] = [*module.parameters(), *module.buffers()]
    if optimizer is not None:
        tensors += [value for entry in optimizer.state.values() for value in entry.values() if torch.is_tensor(value)]
    return held_bytes(tensors)
