"""LAMB and LARS compared with their papers' formulas in float64, on whole tensors and on shards."""

import copy
from typing import Any

import pytest
import torch
from support.ranks import on_ranks
from torch import Tensor, nn

from lathe.nets import MLP
from lathe.optim import LAMB, LARS, build_optimizer

LR, DECAY = 0.3, 0.1


def lars_by_hand(w: Tensor, g: Tensor, state: dict[str, Any], adapted: bool) -> Tensor:
    decay = DECAY if adapted else 0.0
    direction = g + decay * w
    if adapted and w.norm() > 0 and g.norm() > 0:
        direction = 0.02 * w.norm() / (g.norm() + decay * w.norm() + 1e-8) * direction
    state["v"] = 0.9 * state.get("v", 0) + direction
    return w - LR * state["v"]


def lamb_by_hand(w: Tensor, g: Tensor, state: dict[str, Any], adapted: bool) -> Tensor:
    state["t"] = state.get("t", 0) + 1
    state["m"] = 0.9 * state.get("m", 0) + 0.1 * g
    state["v"] = 0.999 * state.get("v", 0) + 0.001 * g**2
    m, v = state["m"] / (1 - 0.9 ** state["t"]), state["v"] / (1 - 0.999 ** state["t"])
    update = m / (v.sqrt() + 1e-6) + (DECAY if adapted else 0.0) * w
    if adapted and w.norm() > 0 and update.norm() > 0:
        update = w.norm() / update.norm() * update
    return w - LR * update


CASES = {
    "LARS": (LARS, lars_by_hand, {"trust_coefficient": 0.02}),
    "LAMB": (LAMB, lamb_by_hand, {}),
}


def gradients(net: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in net.parameters():
        parameter.grad = torch.randn(parameter.shape, dtype=torch.float64, generator=generator).to(parameter.dtype)


def made(name: str, net: nn.Module) -> torch.optim.Optimizer:
    kind, _, options = CASES[name]
    return build_optimizer(net, kind=kind, lr=LR, weight_decay=DECAY, no_decay=["norm", "bias"], **options)


@pytest.mark.parametrize("name", CASES)
def test_steps_are_those_of_the_paper(name: str) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2)).double()
    nn.init.zeros_(net[2].weight)  # a norm of zero: the ratio is 1
    expected = {key: value.detach().clone() for key, value in net.named_parameters()}
    states: dict[str, dict[str, Any]] = {key: {} for key in expected}
    optimizer = made(name, net)
    assert [len(group["params"]) for group in optimizer.param_groups] == [2, 4]
    for step in range(4):
        gradients(net, step)
        for key, parameter in net.named_parameters():
            assert parameter.grad is not None
            adapted = key in ("0.weight", "2.weight")
            expected[key] = CASES[name][1](expected[key], parameter.grad, states[key], adapted)
        optimizer.step()
        for key, parameter in net.named_parameters():
            torch.testing.assert_close(parameter.detach(), expected[key], rtol=1e-12, atol=1e-14)


def test_nesterov_looks_ahead() -> None:
    net = nn.Linear(2, 1, bias=False).double()
    start = net.weight.detach().clone()
    optimizer = LARS(net.parameters(), lr=1.0, momentum=0.5, nesterov=True, trust_coefficient=1.0, eps=0.0)
    net.weight.grad = torch.tensor([[3.0, 4.0]], dtype=torch.float64)
    optimizer.step()
    step = net.weight.grad * start.norm() / 5
    torch.testing.assert_close(net.weight.detach(), start - 1.5 * step)


def sharded(rank: int, name: str) -> list[Tensor]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import distribute_tensor

    torch.manual_seed(0)
    net = MLP(channels=1, image_size=2, num_classes=3, width=5, depth=2)
    whole = copy.deepcopy(net)
    mesh = init_device_mesh("cpu", (2,))
    for block in net.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(net, mesh=mesh)
    optimizers = made(name, net), made(name, whole)
    for step in range(3):
        gradients(whole, step)
        for ours, theirs in zip(net.parameters(), whole.parameters(), strict=True):
            ours.grad = distribute_tensor(theirs.grad, mesh, ours.placements)  # type: ignore[attr-defined, arg-type]
        for optimizer in optimizers:
            optimizer.step()
    return [
        (ours.full_tensor() - theirs).abs().max().detach()  # type: ignore[attr-defined]
        for ours, theirs in zip(net.parameters(), whole.parameters(), strict=True)
    ]


def all_sharded(rank: int) -> list[list[Tensor]]:
    return [sharded(rank, name) for name in CASES]


def test_norms_of_shards_are_those_of_whole_tensors() -> None:
    for cases in on_ranks(all_sharded):
        assert max(difference for differences in cases for difference in differences) < 1e-6
