"""Bytes that can be computed by hand."""

from typing import Any

import pytest
import torch
from support.ranks import on_ranks
from torch import nn

from lathe.measure import PeakMemory, SavedActivations, count_parameters, count_state

CPU = torch.device("cpu")
F = 4  # bytes of a float32


def test_state_of_adamw_is_twice_the_parameters_and_gradients_come_and_go() -> None:
    net = nn.Sequential(nn.Linear(10, 20), nn.BatchNorm1d(20))
    optimizer = torch.optim.AdamW(net.parameters())
    weights = 10 * 20 + 20 + 20 + 20
    assert count_state(net, optimizer) == (before := count_state(net, [optimizer]))
    assert (before.parameters, before.gradients, before.optimizer) == ((weights + 40) * F + 8, 0, 0)
    net(torch.randn(3, 10)).sum().backward()
    optimizer.step()
    after = count_state(net, optimizer)
    assert (after.gradients, after.optimizer) == (
        weights * F,
        2 * weights * F + 4 * F,
    )  # four tensors, each with its step count
    optimizer.zero_grad()
    assert count_state(net, optimizer).gradients == 0


def test_shared_parameters_count_once_and_by_their_dtype() -> None:
    net = nn.Sequential(nn.Linear(5, 5, bias=False), nn.Linear(5, 5, bias=False)).bfloat16()
    net[1].weight = net[0].weight
    assert (count_parameters(net).total, count_state(net).parameters) == (25, 50)


def test_saved_activations_are_those_of_backward_without_parameters() -> None:
    net = nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 5))
    x = torch.randn(3, 10)
    with SavedActivations(net) as saved:
        loss = net(x).sum()
        # The first Linear keeps its input, ReLU and the second Linear share one tensor.
        assert saved.look() == (3 * 10 + 3 * 20) * F
        loss.backward()
        assert saved.bytes == 0
    assert saved.peak == 90 * F
    assert net[0].weight.grad is not None
    with SavedActivations(net, data=[x]) as saved:
        net(x).sum().backward()
    assert saved.peak == 60 * F


def test_peak_is_the_sum_of_what_lives_together() -> None:
    known = torch.zeros(100)
    with PeakMemory(CPU, [known]) as memory:
        assert memory.bytes == 100 * F
        a = torch.ones(1000)
        b = a * 2
        assert memory.bytes == 2100 * F
        del a
        assert memory.bytes == 1100 * F
        c = b[:10] + 1
        del b
        assert (memory.bytes, memory.peak) == (110 * F, 2100 * F)
        memory.reset()
        assert memory.peak == 110 * F
        c.untyped_storage().resize_(0)
        assert memory.bytes == 100 * F


def test_peak_sees_the_backward_pass_and_the_optimizer() -> None:
    net = nn.Linear(64, 64, bias=False)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    with PeakMemory(CPU, net.parameters()) as memory:
        for _ in range(2):
            net(torch.randn(1, 64)).sum().backward()
            optimizer.step()
    weight = 64 * 64 * F
    assert memory.bytes == pytest.approx(3 * weight, rel=0.01)  # weight, gradient, momentum
    assert memory.peak == pytest.approx(4 * weight, rel=0.05)  # a second gradient is computed while the first exists


def sharded(rank: int) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(8)])
    mesh = init_device_mesh("cpu", (2,))
    for block in net:
        fully_shard(block, mesh=mesh)
    fully_shard(net, mesh=mesh)
    optimizer = torch.optim.AdamW(net.parameters())
    x = torch.randn(2, 64)
    peaks = []
    with PeakMemory(CPU, [x, *net.parameters()]) as memory:
        for _ in range(2):
            memory.reset()
            with SavedActivations(net) as saved:
                loss = net(x).sum()
                saved.look()
                loss.backward()
            state = count_state(net, optimizer)
            optimizer.step()
            optimizer.zero_grad()
            peaks.append(memory.peak)
    count = count_parameters(net)
    return state.parameters, state.gradients, state.optimizer, saved.peak, peaks[-1], (count.total, count.non_zero)


def test_shards_count_as_shards() -> None:
    block = 64 * 64 * F
    for parameters, gradients, optimizer, activations, peak, count in on_ranks(sharded):
        assert parameters == gradients == 4 * block
        assert optimizer == pytest.approx(8 * block, rel=0.01)
        assert activations == 8 * 2 * 64 * F  # eight inputs; no gathered weight
        dense = (8 + 8 + 16) * block
        assert dense / 2 < peak < dense
        assert count == (8 * 64 * 64, 8 * 64 * 64)
