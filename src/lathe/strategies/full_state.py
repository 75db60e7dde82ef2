"""Between tensors that are spread over ranks and the plain tensors that a checkpoint file holds.

A checkpoint has full tensors on the CPU, and an optimizer's state in torch's own format (parameter ids in the order of
the groups), so that a run can be opened and continued under any other strategy.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer


def full(tensor: Tensor) -> Tensor:
    """The whole of `tensor` on the CPU, detached. Collective where the tensor is spread: every rank of its mesh takes
    part.
    """
    tensor = tensor.detach()
    if isinstance(tensor, DTensor):
        mesh_type = tensor.device_mesh.device_type
        spread = (
            tensor if tensor.to_local().device.type == mesh_type else tensor.to(mesh_type)
        )  # offloaded: no collectives there
        assert isinstance(spread, DTensor)
        tensor = spread.full_tensor()
    return tensor.cpu()


def full_tree(tree: Any, keep: bool = True) -> Any:
    """`tree` (nested dicts, lists and tuples) with every spread tensor replaced by the whole one; where `keep` is
    false, by an empty one, so that only the rank that writes holds everything. Collective: every rank passes a tree of
    the same keys in the same order.
    """

    def gather(leaf: Tensor, path: tuple[Any, ...]) -> Tensor:
        whole = full(leaf)
        return whole if keep else whole.new_empty(0)

    return map_spread(tree, gather)


def map_spread(tree: Any, function: Callable[[DTensor, tuple[Any, ...]], Any], path: tuple[Any, ...] = ()) -> Any:
    """`tree` with `function(leaf, path of keys)` in the place of each spread tensor, in order; all else is passed on as
    it is.
    """
    if isinstance(tree, DTensor):
        return function(tree, path)
    if isinstance(tree, Mapping):
        return {key: map_spread(value, function, (*path, key)) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(map_spread(value, function, (*path, index)) for index, value in enumerate(tree))
    return tree


def spread_like(tensor: Tensor, reference: Tensor) -> Tensor:
    """A full tensor as `reference` is spread: each rank cuts its own part out, without communication. If it is spread
    so already, or `reference` is not spread, it comes back as it is."""
    if not isinstance(reference, DTensor):
        return tensor
    if isinstance(tensor, DTensor):
        same = tensor.device_mesh == reference.device_mesh and tensor.placements == reference.placements
        if same:
            return tensor
        tensor = full(tensor)
    spread = distribute_tensor(tensor, reference.device_mesh, reference.placements, src_data_rank=None)
    local = spread.to_local().to(reference.to_local().device, copy=True)  # a part keeps the whole in memory
    return DTensor.from_local(
        local, spread.device_mesh, spread.placements, run_check=False, shape=spread.shape, stride=spread.stride()
    )


def load_full_state_dict(module: nn.Module, state: Mapping[str, Tensor], strict: bool = True) -> None:
    """Puts full tensors into a module whose parameters may be spread; as `module.load_state_dict` otherwise."""
    own = module.state_dict()
    module.load_state_dict(
        {name: spread_like(value, own[name]) if name in own else value for name, value in state.items()}, strict=strict
    )


def full_optimizer_state(optimizer: Optimizer) -> dict[str, Any]:
    """What `optimizer.state_dict()` would be in a single process. Collective."""
    state: dict[str, Any] = full_tree(optimizer.state_dict())
    return state


def load_full_optimizer_state(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Puts the state of a single process's optimizer (see `full_optimizer_state`) into one whose parameters may be
    spread: entries of a parameter's shape are spread as it is."""
    by_id = parameters_by_id(optimizer)
    entries = {
        number: {name: _own(value, by_id.get(number)) for name, value in entry.items()}
        for number, entry in state["state"].items()
    }
    optimizer.load_state_dict({**state, "state": entries})


def parameters_by_id(optimizer: Optimizer) -> dict[int, Tensor]:
    """An optimizer's parameters by the numbers that its `state_dict` gives them."""
    return dict(enumerate(parameter for group in optimizer.param_groups for parameter in group["params"]))


def _own(value: Any, parameter: Tensor | None) -> Any:
    """A copy of an entry, spread as its parameter is if it has its shape."""
    if not isinstance(value, Tensor):
        return value
    spread = spread_like(value, parameter) if parameter is not None and value.shape == parameter.shape else value
    return spread.clone() if spread is value else spread


def held_bytes(tensors: list[Tensor]) -> int:
    """Bytes of these tensors that this rank holds; a tensor named twice counts once."""
    local = {id(t): t.to_local() if isinstance(t, DTensor) else t for t in tensors}
    return sum(t.numel() * t.element_size() for t in local.values() if not t.is_meta)


def held_by(module: nn.Module, optimizer: Optimizer | None = None) -> int:
    """Bytes of parameters, buffers and optimizer state that this rank holds."""
    tensors: list[Tensor] = [*module.parameters(), *module.buffers()]
    if optimizer is not None:
        tensors += [value for entry in optimizer.state.values() for value in entry.values() if torch.is_tensor(value)]
    return held_bytes(tensors)
