"""Blocks run in turn, keep their names, and a chain of them is cut evenly."""

import pytest
import torch
from torch import nn

from lathe.nets import Blocks, blocks_of
from lathe.nets.blocks import own_blocks, segments


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


@pytest.mark.parametrize(
    ("count", "lengths"), [(0, []), (1, [1]), (2, [2]), (3, [1, 2]), (9, [3, 3, 3]), (10, [3, 3, 4]), (64, [8] * 8)]
)
def test_segments_are_about_the_root_of_the_number_of_blocks(count: int, lengths: list[int]) -> None:
    blocks = [nn.ReLU() for _ in range(count)]
    cut = segments(blocks)
    assert [len(segment) for segment in cut] == lengths
    assert [block for segment in cut for block in segment] == blocks


def test_blocks_that_live_on_another_rank_are_not_counted() -> None:
    mine = [nn.ReLU(), nn.Tanh()]
    assert own_blocks(Blocks([nn.Identity(), *mine, nn.Identity()])) == mine
