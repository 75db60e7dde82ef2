"""Bias correction restores each layer's mean outputs from before its weights were rounded."""

import copy

import pytest
import torch
from torch import Tensor, nn

from lathe.compression.quantization.equalize import channel_means, correct_bias, expected_outputs, followers
from lathe.nets import MLP, CifarResNet, ViT


def rounded(net: nn.Module) -> nn.Module:
    """Return a copy whose weights are rounded down to 3 bits, so that means shift."""
    net = copy.deepcopy(net)
    with torch.no_grad():
        for module in net.modules():
            if isinstance(module, (nn.Conv2d, nn.Linear)):
                step = module.weight.abs().max() / 3
                module.weight.copy_((module.weight / step).floor() * step)
    return net


def largest_shift(net: nn.Module, x: Tensor, expected: dict[str, Tensor]) -> float:
    return max(float((mean - expected[name]).abs().max()) for name, mean in expected_outputs(net, x).items())


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "batchnorm"])
def test_means_are_restored(bias: bool) -> None:
    torch.manual_seed(0)
    if bias:
        net: nn.Module = MLP(channels=1, image_size=4, num_classes=3, width=8, depth=3).eval()
        x = torch.rand(32, 1, 4, 4)
    else:
        net = CifarResNet(depth=8, width=4).eval()
        x = torch.rand(32, 3, 8, 8)
    expected, worse = expected_outputs(net, x), rounded(net)
    norms = followers(net, x)
    before = largest_shift(worse, x, expected)
    outputs = net(x)
    error = (worse(x).mean(0) - outputs.mean(0)).abs().max()
    done = correct_bias(worse, x, expected, norms)
    assert done["uncorrected"] == []
    assert done["bias"] == (list(expected) if bias else ["head"])
    assert done["batchnorm"] == ([] if bias else [name for name in expected if name != "head"])
    if bias:
        assert before > 0.05
        assert largest_shift(worse, x, expected) < 1e-5
    # A layer without a bias keeps its shift and its BatchNorm removes it: the net's output counts.
    assert (worse(x).mean(0) - outputs.mean(0)).abs().max() < 1e-5 < error


def test_the_first_batchnorm_by_hand() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 2, 3, bias=False), nn.BatchNorm2d(2)).eval()
    x, norms = torch.rand(8, 1, 5, 5), {"0": "1"}
    expected = expected_outputs(net, x)
    assert torch.allclose(expected["0"], net[0](x).mean(dim=(0, 2, 3)))
    worse = rounded(net)
    shift = worse[0](x).mean(dim=(0, 2, 3)) - expected["0"]  # type: ignore[index]
    correct_bias(worse, x, expected, norms)
    assert torch.allclose(worse[1].running_mean, shift, atol=1e-6)  # type: ignore[index]
    assert torch.allclose(worse(x).mean(dim=(0, 2, 3)), net(x).mean(dim=(0, 2, 3)), atol=1e-6)


def test_linear_layers_over_tokens() -> None:
    torch.manual_seed(0)
    net = ViT(channels=1, image_size=8, num_classes=3, patch_size=4, width=8, depth=1, heads=2).eval()
    x = torch.rand(8, 1, 8, 8)
    expected, worse = expected_outputs(net, x), rounded(net)
    assert expected["blocks.0.up"].shape == (32,)
    correct_bias(worse, x, expected, {})
    assert largest_shift(worse, x, expected) < 1e-5


def test_means_in_parts_are_the_means() -> None:
    images, tokens = torch.randn(100, 4, 5, 5, dtype=torch.float64).float(), torch.randn(100, 7, 4)
    torch.testing.assert_close(channel_means(nn.Conv2d(1, 4, 1), images), images.double().mean((0, 2, 3)).float())
    torch.testing.assert_close(channel_means(nn.Linear(1, 4), tokens), tokens.double().mean((0, 1)).float())
