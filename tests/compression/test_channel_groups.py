"""Dependent channels are found, untraceable layers refused; the head's outputs and the input stay."""

import pytest
import torch
from torch import nn

from lathe.compression.channels.groups import find_groups, head_groups, layers
from lathe.errors import UserError
from lathe.nets import GPT, CifarResNet

IMAGES = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def test_a_residual_stream_is_one_group_and_a_block_has_one_of_its_own():
    groups = {group.name: group for group in find_groups(CifarResNet(depth=8, width=4), IMAGES)}
    assert {name: group.units for name, group in groups.items()} == {
        "conv": 4,
        "blocks.0.conv1": 4,
        "blocks.1.conv1": 8,
        "blocks.1.shortcut.conv": 8,
        "blocks.2.conv1": 16,
        "blocks.2.shortcut.conv": 16,
    }
    assert set(layers(groups["conv"])) == {"conv", "bn", "blocks.0.conv2", "blocks.0.bn2"}
    reads = {part.name for part in groups["conv"].slices if part.role == "in"}
    assert reads == {"blocks.0.conv1.weight", "blocks.1.conv1.weight", "blocks.1.shortcut.conv.weight"}


def test_the_heads_outputs_and_the_input_are_in_no_group():
    net = CifarResNet(depth=8, width=4)
    for group in find_groups(net, IMAGES):
        for part in group.slices:
            assert (part.name, part.dim) not in {("head.weight", 0), ("head.bias", 0), ("conv.weight", 1)}


def test_a_transformer_has_heads_and_hidden_units_and_keeps_its_width():
    net = GPT(vocab_size=20, max_length=8, width=32, depth=2, heads=4)
    groups = find_groups(net, torch.randint(0, 20, (2, 8)))
    assert [(group.name, group.kind, group.units) for group in groups] == [
        ("blocks.0.up", "channels", 128),
        ("blocks.1.up", "channels", 128),
        ("blocks.0.attention", "heads", 4),
        ("blocks.1.attention", "heads", 4),
    ]
    assert [group.name for group in head_groups(net)] == ["blocks.0.attention", "blocks.1.attention"]


def test_padded_shortcuts_are_refused():
    with pytest.raises(UserError, match=r"padded with zeros: build it with shortcut=projection where it has that"):
        find_groups(CifarResNet(depth=8, width=4, shortcut="zero_pad"), IMAGES)


class Shuffled(nn.Module):
    """Its channels are reversed by an operation that a graph of shapes does not show."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x).flip(1))


class Offset(Shuffled):
    """A zero channel is not zero at the next layer's input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.sigmoid(self.a(x)))


@pytest.mark.parametrize("kind", [Shuffled, Offset])
def test_channels_that_cant_be_followed_are_refused(kind):
    with pytest.raises(UserError, match=rf"How {kind.__name__} joins its channels can't be followed"):
        find_groups(kind(), torch.randn(2, 4))


def test_the_net_does_not_change():
    net = CifarResNet(depth=8, width=4).train()
    net.conv.weight.requires_grad_(False)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    find_groups(net, IMAGES)
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())
    assert net.training
    assert not net.conv.weight.requires_grad
