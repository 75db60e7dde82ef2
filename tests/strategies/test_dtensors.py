"""Sharded tensors are gathered whole, and whole ones are sharded like their counterparts."""

from typing import Any

import torch
from support.ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from lathe.strategies.dtensors import (
    full,
    full_tree,
    load_full_optimizer_state,
    load_full_state_dict,
    shard_like,
)


def stepped(net: nn.Module, steps: int = 1, optimizer: torch.optim.Optimizer | None = None) -> torch.optim.Optimizer:
    """Step on gradients that depend only on the step's number."""
    optimizer = optimizer or torch.optim.AdamW(net.parameters(), lr=0.1)
    for step in range(steps):
        (net(torch.ones(2, 3)) * (step + 1)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def made() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.BatchNorm1d(5), nn.Linear(5, 1))


def on_two(rank: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2,))
    tensor = torch.arange(15.0).view(5, 3)
    spread = distribute_tensor(tensor, mesh, [Shard(0)])
    tree = {"a": [spread, {"b": (spread, 1)}], "c": tensor}
    found: dict[str, Any] = {"full": full(spread), "kept": full_tree(tree), "dropped": full_tree(tree, keep=False)}
    again = shard_like(tensor, spread)
    assert isinstance(again, DTensor)
    found["again"] = again.full_tensor()
    found["local"] = again.to_local().untyped_storage().nbytes()  # a view would keep the whole alive
    other = shard_like(spread, distribute_tensor(tensor, mesh, [Replicate()]))
    found["other"] = other.to_local()
    found["same"] = shard_like(spread, spread) is spread
    found["plain"] = shard_like(tensor, tensor) is tensor

    net = made().eval()
    fully_shard(net, mesh=mesh)
    optimizer = stepped(net, 2)
    found["state"], found["weights"] = full_tree(optimizer.state_dict()), full_tree(net.state_dict())
    fresh = made().eval()
    fully_shard(fresh, mesh=mesh)
    load_full_state_dict(fresh, found["weights"])
    second = torch.optim.AdamW(fresh.parameters(), lr=0.5)
    load_full_optimizer_state(second, found["state"])
    stepped(fresh, 1, second)
    found["after"] = full_tree(fresh.state_dict())
    return found


def test_there_and_back() -> None:
    tensor = torch.arange(15.0).view(5, 3)
    one = made().eval()
    optimizer = stepped(one, 2)
    weights = {name: value.clone() for name, value in one.state_dict().items()}
    state = {
        number: {k: v.clone() for k, v in entry.items()} for number, entry in optimizer.state_dict()["state"].items()
    }
    stepped(one, 1, optimizer)
    for number, rank in enumerate(on_ranks(on_two)):
        assert torch.equal(rank["full"], tensor)
        assert torch.equal(rank["kept"]["a"][1]["b"][0], tensor)
        assert rank["kept"]["a"][1]["b"][1] == 1
        assert rank["dropped"]["a"][0].numel() == rank["dropped"]["a"][1]["b"][0].numel() == 0
        assert torch.equal(rank["dropped"]["c"], tensor)
        assert torch.equal(rank["again"], tensor)
        assert rank["local"] == (3, 2)[number] * 3 * 4
        assert torch.equal(rank["other"], tensor)
        assert rank["same"]
        assert rank["plain"]
        assert rank["state"]["param_groups"] == optimizer.state_dict()["param_groups"]
        for key, entry in state.items():
            for name, value in entry.items():
                torch.testing.assert_close(rank["state"]["state"][key][name], value)
        for expected, got in ((weights, rank["weights"]), (one.state_dict(), rank["after"])):
            assert list(expected) == list(got)
            for name, value in expected.items():
                torch.testing.assert_close(got[name], value)
