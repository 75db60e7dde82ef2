"""Counts compared with arithmetic."""

import torch
from torch import nn

from lathe.measure.params import count_parameters


def test_counts_of_a_small_net() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    net[1].weight.requires_grad_(False)
    with torch.no_grad():
        net[0].weight.fill_(1.0)
        net[0].weight[0].zero_()
        net[0].bias.zero_()
        net[0].bias[1] = -1.0
    count = count_parameters(net)
    assert count.total == 12 + 4 + 4 + 4
    assert count.trainable == 20
    assert count.non_zero == 9 + 1 + 4 + 0
    assert count.bytes == 4 * 24 + 4 * 8 + 8  # running mean and variance, and the int64 count of batches
    assert count.sparsity == 1 - 14 / 24


def test_shared_parameters_count_once_and_dtype_counts() -> None:
    net = nn.Sequential(nn.Linear(5, 5, bias=False), nn.Linear(5, 5, bias=False)).bfloat16()
    net[1].weight = net[0].weight
    assert (count_parameters(net).total, count_parameters(net).bytes) == (25, 50)
