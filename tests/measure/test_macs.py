"""Multiply-accumulates compared with arithmetic and `count_flops`."""

import pytest
import torch
from torch import nn

from lathe.measure import count_flops, count_macs
from lathe.measure.macs import LayerMacs
from lathe.nets import GPT, CifarResNet, ViT


def small() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 25, 3)
    )


def test_layers_by_arithmetic() -> None:
    found = count_macs(small(), torch.randn(6, 2, 5, 5))
    assert found.layers == {"0": LayerMacs(6 * 25 * 4 * 2 * 9, 1.0), "4": LayerMacs(6 * 300, 1.0)}
    assert found.dense == found.effective == 6 * 1800 + 6 * 300


def test_zeros_save_effective_macs_alone() -> None:
    net = small()
    with torch.no_grad():
        net[0].weight[:3].zero_()  # three of four filters
        net[4].weight.view(-1)[:30].zero_()  # a tenth
    found = count_macs(net, torch.randn(1, 2, 5, 5))
    assert found.layers["0"].density == 0.25
    assert (found.dense, found.effective) == (1800 + 300, 450 + 270)


@pytest.mark.parametrize(
    ("net", "example"),
    [
        (CifarResNet(depth=8, width=4), torch.randn(2, 3, 16, 16)),
        (
            ViT(image_size=8, patch_size=4, channels=1, num_classes=3, width=8, depth=2, heads=2),
            torch.randn(2, 1, 8, 8),
        ),
        (GPT(vocab_size=11, max_length=6, width=8, depth=2, heads=2), torch.randint(0, 11, (2, 6))),
    ],
    ids=["resnet", "vit", "gpt"],
)
def test_the_whole_is_half_the_flops(net: nn.Module, example: torch.Tensor) -> None:
    found = count_macs(net, example)
    assert found.dense == found.effective == count_flops(net, example) // 2
    assert 0 < sum(layer.dense for layer in found.layers.values()) <= found.dense


def test_a_layer_that_runs_twice_counts_twice() -> None:
    layer = nn.Linear(5, 5)
    assert count_macs(nn.Sequential(layer, nn.ReLU(), layer), torch.randn(1, 5)).layers == {"0": LayerMacs(50, 1.0)}
