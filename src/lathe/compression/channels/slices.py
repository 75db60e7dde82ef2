"""Removal of channels, heads and hidden units from a net, and the resulting shapes as plain data."""

import copy
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lathe.errors import UserError

_KEY = "_channels_removed"  # in a net's __dict__, which deepcopy copies


@dataclass(frozen=True)
class Slice:
    """Positions of a group's units in one tensor: `index` `[units, positions]` of dimension `dim`.

    `role` is "out" for tensors that make a unit's output (a convolution's rows and bias, a BatchNorm's weight and
    bias), which is zero if all of these are; "in" for tensors that read it (a convolution's columns); "state" for
    running statistics.
    """

    module: str
    tensor: str
    dim: int
    index: Tensor
    role: Literal["out", "in", "state"]

    @property
    def name(self) -> str:
        """Return the tensor's name in the net."""
        return f"{self.module}.{self.tensor}" if self.module else self.tensor


@dataclass(frozen=True)
class Group:
    """Units that have to be removed from all their layers together: channels, heads or hidden units.

    `name` is that of the first layer. `sizes` are module attributes that count units: (module, attribute, its count per
    unit).
    """

    name: str
    kind: Literal["channels", "heads"]
    units: int
    slices: tuple[Slice, ...]
    sizes: tuple[tuple[str, str, int], ...]


def remove(net: nn.Module, groups: Iterable[Group], chosen: Mapping[str, Sequence[int]]) -> None:
    """Remove the units `chosen[group.name]` of each group from `net`, in place.

    Tensors are replaced by smaller ones; create optimizers afterwards. The net's output does not change if the units'
    "out" slices are zero.
    """
    groups = list(groups)
    dropped = positions(groups, chosen)
    sizes: dict[tuple[str, str], int] = defaultdict(int)
    for group in groups:
        for path, attribute, width in group.sizes if chosen.get(group.name) else ():
            sizes[path, attribute] += width * len(chosen[group.name])
    new: dict[int, Tensor] = {}
    for name, dims in dropped.items():
        tensor = _tensor(net, name)
        if id(tensor) not in new:  # a tied tensor is cut once
            new[id(tensor)] = _without(tensor, dims)
    for name, tensor in [*net.named_parameters(remove_duplicate=False), *net.named_buffers(remove_duplicate=False)]:
        if id(tensor) in new:
            _put(net, name, new[id(tensor)])
    for name, dims in dropped.items():
        if name.endswith(".weight") and 0 in dims:
            _cut_quantizer(net, name.removesuffix(".weight"), dims[0])
    for (path, attribute), count in sizes.items():
        module = net.get_submodule(path)
        setattr(module, attribute, getattr(module, attribute) - count)
    if dropped:
        noted = net.__dict__.setdefault(_KEY, {"tensors": {}, "modules": {}})
        noted["tensors"] |= {name: list(_tensor(net, name).shape) for name in dropped}
        for path, attribute in sizes:
            noted["modules"].setdefault(path, {})[attribute] = getattr(net.get_submodule(path), attribute)


def fading(groups: Sequence[Group], chosen: Mapping[str, Sequence[int]], net: nn.Module) -> dict[str, Tensor]:
    """Return masks, True where a weight makes the output of a unit in `chosen`, by parameter name.

    A unit's output is zero if all of these are: rows and bias of each convolution that writes its channel, and the
    BatchNorms' weight and bias, whatever their running statistics.
    """
    parameters = dict(net.named_parameters())
    masks: dict[str, Tensor] = {}
    for group in groups:
        units = list(chosen.get(group.name, ()))
        for part in group.slices if units else ():
            if part.role == "out":
                mask = masks.setdefault(part.name, torch.zeros(parameters[part.name].shape, dtype=torch.bool))
                mask.index_fill_(part.dim, part.index[units].flatten(), True)
    return masks


def silence(net: nn.Module, groups: Sequence[Group], chosen: Mapping[str, Sequence[int]]) -> None:
    """Zero the weights that make the output of the chosen units, in place."""
    parameters = dict(net.named_parameters())
    with torch.no_grad():
        for name, mask in fading(groups, chosen, net).items():
            parameters[name].masked_fill_(mask.to(parameters[name].device), 0.0)


def positions(groups: Iterable[Group], chosen: Mapping[str, Sequence[int]]) -> dict[str, dict[int, set[int]]]:
    """Return the positions that `remove` removes, by tensor name and dimension."""
    found: dict[str, dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))
    for group in groups:
        units = list(chosen.get(group.name, ()))
        for part in group.slices if units else ():
            found[part.name][part.dim].update(part.index[units].flatten().tolist())
    return found


def staying(shape: Sequence[int], dims: Mapping[int, Iterable[int]]) -> tuple[Tensor, ...]:
    """Return an index of what remains of a tensor of `shape` without the positions `dims`."""
    gone = {dim: set(places) for dim, places in dims.items()}
    kept = [[i for i in range(size) if i not in gone.get(dim, ())] for dim, size in enumerate(shape)]
    return tuple(torch.tensor(places).view(-1, *[1] * (len(shape) - 1 - dim)) for dim, places in enumerate(kept))


def describe(net: nn.Module) -> dict[str, Any]:
    """Return the shapes that removal has changed, as plain data; empty if none."""
    return copy.deepcopy(net.__dict__.get(_KEY, {}))


def rebuild(net: nn.Module, description: dict[str, Any]) -> None:
    """Give `net` the shapes that `describe` returned, in place; load values afterwards.

    Raises:
        UserError: the net has no such tensors, or they are smaller.
    """
    tensors, modules = description["tensors"], description["modules"]
    named = {**dict(net.named_parameters(remove_duplicate=False)), **dict(net.named_buffers(remove_duplicate=False))}
    for name, shape in tensors.items():
        old: Any = tuple(named[name].shape) if name in named else ()
        if len(old) != len(shape) or any(not 0 < size <= was for size, was in zip(shape, old, strict=True)):
            raise UserError(
                f"The structure's {name} has shape {list(shape)}, and the net's {list(old)}: it is of another net."
            )
    for path, attributes in modules.items():  # before any change
        for attribute, value in attributes.items():
            old = getattr(net.get_submodule(path), attribute)
            if type(old) is not int or type(value) is not int or not 0 < value <= old:
                raise UserError(
                    f"The structure's {path}.{attribute} is {value!a}, and the net's {old!r:.60}: it is of another net."
                )
    new: dict[int, Tensor] = {}
    for name, shape in tensors.items():
        tensor = named[name]
        if id(tensor) not in new:
            new[id(tensor)] = _like(tensor, tensor.detach()[tuple(slice(size) for size in shape)].clone())
    for name, tensor in named.items():  # a tied tensor has several names
        if id(tensor) in new:
            _put(net, name, new[id(tensor)])
    for path, attributes in modules.items():
        for attribute, value in attributes.items():
            setattr(net.get_submodule(path), attribute, value)
    net.__dict__[_KEY] = copy.deepcopy(description)


def _tensor(net: nn.Module, name: str) -> Tensor:
    path, _, attribute = name.rpartition(".")
    tensor: Tensor = getattr(net.get_submodule(path), attribute)
    return tensor


def _put(net: nn.Module, name: str, tensor: Tensor) -> None:
    path, _, attribute = name.rpartition(".")
    setattr(net.get_submodule(path), attribute, tensor)


def _like(old: Tensor, values: Tensor) -> Tensor:
    return nn.Parameter(values, requires_grad=old.requires_grad) if isinstance(old, nn.Parameter) else values


def _without(tensor: Tensor, dims: Mapping[int, set[int]]) -> Tensor:
    values = tensor.detach()
    for dim, positions in dims.items():
        keep = [position for position in range(values.shape[dim]) if position not in positions]
        values = values.index_select(dim, torch.tensor(keep, dtype=torch.long, device=values.device))
    return _like(tensor, values)


def _cut_quantizer(net: nn.Module, path: str, positions: set[int]) -> None:
    """Remove the channels' scales from a quantizer with one scale per output channel."""
    module = net.get_submodule(path)
    quantizer = getattr(module, "weight_quantizer", None)
    if not isinstance(quantizer, nn.Module):
        return
    count = len(_tensor(module, "weight")) + len(positions)
    for name, tensor in [*quantizer.named_parameters(), *quantizer.named_buffers()]:
        if tensor.dim() and len(tensor) == count > 1:
            _put(quantizer, name, _without(tensor, {0: positions}))
