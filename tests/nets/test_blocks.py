"""Blocks run in turn and keep their names."""

import pytest
import torch
from torch import nn

from lathe.nets import Blocks, blocks_of


def test_blocks_run_one_after_the_other_under_plain_names() -> None:
    first, second = nn.Linear(2, 3), nn.Linear(3, 4)
    chain = Blocks([first, second])
    x = torch.rand(5, 2)
    assert torch.equal(chain(x), second(first(x)))
    assert [name for name, _ in chain.named_parameters()] == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert Blocks()(x) is x


@pytest.mark.parametrize("kind", [Blocks, nn.ModuleList, list, tuple, lambda blocks: nn.Sequential(*blocks)])
def test_blocks_of_lists_what_a_net_names(kind) -> None:
    blocks = [nn.Linear(2, 2), nn.ReLU()]
    net = nn.Module()
    net.blocks = kind(blocks)
    assert blocks_of(net) == blocks
