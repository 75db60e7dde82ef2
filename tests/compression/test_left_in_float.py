"""Layers that can't be quantized are reported with their share of weights, unless excluded by the user."""

import torch
from torch import Tensor, nn

from lathe.compression.quantization.layers import float_sentence, left_in_float
from lathe.compression.quantization.net import quantize


class Mixed(nn.Module):
    """A one-dimensional convolution, which can't be quantized, and two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.zeros(1, 4, 100))
        self.conv = nn.Conv1d(4, 4, 3, padding=1)  # 48 weights
        self.up = nn.Linear(8, 4)  # 32
        self.head = nn.Linear(16, 5)  # 80

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.up(self.conv(x)).flatten(1))
        return out


class Batches:
    def train_dataloader(self) -> list[tuple[Tensor, Tensor]]:
        return [(torch.randn(8, 4, 8, generator=torch.Generator().manual_seed(0)), torch.zeros(8))]


def test_share_and_names() -> None:
    net = Mixed()
    quantize(net, torch.randn(2, 4, 8), overrides={"head": None})
    assert left_in_float(net) == (128 / 160, ["head.weight", "conv.weight"])
    assert left_in_float(net, ["head"]) == (48 / 160, ["conv.weight"])
    assert left_in_float(net, ["head", "conv"])[0] == 0
    sentence = float_sentence(net, "compression.qat", {"head": None})
    assert sentence is not None
    assert sentence.startswith("compression.qat leaves 30.0% of the weights in float, such as conv.weight: ")
