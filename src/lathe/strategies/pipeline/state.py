"""Converts between a stage's tensors in memory and the one full checkpoint on disk."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lathe.strategies.full_state import full, spread_like
from lathe.strategies.pipeline.cut import Cut


def tables(
    state: Any, names: set[str], path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], dict[str, Tensor]]]:
    """Yield each dict in a checkpoint of tensors by the net's names, such as the weights, with its path."""
    if not isinstance(state, dict) or not state:
        return
    if all(isinstance(value, Tensor) for value in state.values()) and names.issuperset(state):
        yield path, state
        return
    for key, value in state.items():
        if isinstance(key, str) and key != "optimizer_states":
            yield from tables(value, names, (*path, key))


def gather(checkpoint: dict[str, Any], cut: Cut, ranks: list[int], device: torch.device, send: bool = True) -> None:
    """Complete the checkpoint of the first of `ranks` (one per stage) with the tensors of the others.

    Ranks without `send` only help to gather tensors that are sharded over them.
    """
    whole = set(cut.tensors)
    shown = cut.shown()
    mine: dict[tuple[str, ...], dict[str, Tensor]] = {}
    for path, table in tables(checkpoint, whole):
        mine[path] = {name: plain(value) for name, value in table.items() if name in shown}
    states = [_numbered(state, cut) for state in checkpoint.get("optimizer_states", [])]
    rank = dist.get_rank()
    if not send:
        return
    options: dict[str, Any] = {"device": device} if dist.get_backend() == "nccl" else {}
    if rank in ranks[1:]:
        dist.send_object_list([mine, states], dst=ranks[0], **options)
    if rank != ranks[0]:
        return
    for source in ranks[1:]:
        box: list[Any] = [None, None]
        dist.recv_object_list(box, src=source, **options)
        for path, table in box[0].items():
            mine.setdefault(path, {}).update(table)
        for state, other in zip(states, box[1], strict=True):
            for number, values in other.items():
                state.setdefault(number, values)
    order = {name: position for position, name in enumerate(cut.tensors)}
    for path, table in mine.items():
        *parents, last = path
        node = checkpoint
        for key in parents:
            node = node[key]
        node[last] = {name: table[name] for name in sorted(table, key=order.__getitem__)}
    for position, state in enumerate(states):
        groups, number = [], 0
        for group, names in zip(checkpoint["optimizer_states"][position]["param_groups"], cut.groups, strict=True):
            groups.append({**group, "params": list(range(number, number + len(names)))})
            number += len(names)
        checkpoint["optimizer_states"][position] = {"state": dict(sorted(state.items())), "param_groups": groups}


def _numbered(state: dict[str, Any], cut: Cut) -> dict[int, dict[str, Any]]:
    """Return a stage's optimizer state by the ids that parameters have in the optimizer of the whole net."""
    numbers = {name: number for number, name in enumerate(name for group in cut.groups for name in group)}
    names = cut.optimizer_names()
    return {
        numbers[names[own]]: {
            key: plain(value) if isinstance(value, Tensor) else value for key, value in values.items()
        }
        for own, values in state["state"].items()
    }


def plain(tensor: Tensor) -> Tensor:
    """Return a full copy on the CPU that shares no memory. Collective if the tensor is sharded."""
    return full(tensor).clone()


def localise(checkpoint: dict[str, Any], cut: Cut) -> None:
    """Reduce a full checkpoint to this stage's tensors. The optimizer's state stays full until the optimizer exists."""
    own = cut.net.state_dict()
    for _, table in list(tables(checkpoint, set(cut.tensors))):
        for name in list(table):
            if name in own:
                table[name] = spread_like(table[name], own[name])
            else:
                del table[name]


def local_optimizer_state(state: dict[str, Any], cut: Cut) -> dict[str, Any]:
    """Return this stage's part of the whole net's optimizer state, by this stage's ids."""
    sizes = [len(group["params"]) for group in state["param_groups"]]
    if sizes != [len(names) for names in cut.groups]:
        raise ValueError(
            f"the checkpoint's optimizer has groups of {sizes} parameters, this one of {[len(n) for n in cut.groups]}"
        )
    parameters = dict(cut.net.named_parameters())
    local: dict[int, Any] = {}
    groups = []
    own = 0
    for group, names in zip(state["param_groups"], cut.groups, strict=True):
        kept = []
        for number, name in zip(group["params"], names, strict=True):
            if name not in parameters:
                continue
            if number in state["state"]:
                local[own] = {
                    key: _state_like(value, parameters[name]) for key, value in state["state"][number].items()
                }
            kept.append(own)
            own += 1
        groups.append({**group, "params": kept})
    return {"state": local, "param_groups": groups}


def _state_like(value: Any, parameter: nn.Parameter) -> Any:
    return spread_like(value, parameter) if isinstance(value, Tensor) and value.shape == parameter.shape else value
