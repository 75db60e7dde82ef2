"""Sparsities are geometric; rewinding gives back a copy that training has not touched."""

import pytest
import torch
from torch import nn

from lathe.compression.masks.lottery import copy_state, rewind, round_sparsities


def test_each_round_removes_the_same_share_of_what_is_left() -> None:
    sparsities = round_sparsities(0.784, 4)
    assert sparsities == pytest.approx([0.0, 0.4, 0.64, 0.784])
    assert round_sparsities(0.5, 2) == [0.0, 0.5]


def test_rewinding_restores_copies_of_weights_and_statistics_and_leaves_zeros() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 36, 2))
    early = copy_state(net)
    kept = {name: tensor.clone() for name, tensor in early.items()}
    identities = [id(parameter) for parameter in net.parameters()]
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(3):
        net(torch.randn(8, 1, 8, 8)).square().mean().backward()
        optimizer.step()
    assert not torch.equal(net[0].weight, early["0.weight"])
    assert all(torch.equal(early[name], kept[name]) for name in kept)  # no alias
    mask = torch.rand(4, 1, 3, 3) > 0.5
    rewind(net, early, {"0.weight": mask})
    for name, tensor in net.state_dict().items():
        wanted = kept[name] * mask if name == "0.weight" else kept[name]
        assert torch.equal(tensor, wanted), name
    assert [id(parameter) for parameter in net.parameters()] == identities  # the optimizer still holds them
    net[0].weight.data.add_(1)
    assert torch.equal(early["0.weight"], kept["0.weight"])
