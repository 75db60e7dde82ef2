"""A small net with its input, and fixed random numbers, for the tests of quantization."""

import pytest
import torch
from torch import nn

from lathe.nets import CifarResNet


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def resnet() -> nn.Module:
    return CifarResNet(depth=8, width=4, in_channels=1).eval()


X = torch.rand(4, 1, 8, 8)
