"""Equalization and bias correction keep a net's outputs and their means."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lathe.compression.quantization.equalize import (
    Pair,
    channel_means,
    correct_bias,
    equalize,
    expected_outputs,
    find_pairs,
    followers,
)
from lathe.nets import MLP, CifarResNet


def trained(net: nn.Module) -> nn.Module:
    """Return the net with BatchNorm statistics and weights as after training: no two channels are equal."""
    torch.manual_seed(0)
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            assert module.running_mean is not None
            assert module.running_var is not None
            module.running_mean.normal_()
            module.running_var.uniform_(0.1, 3)
            module.weight.data.uniform_(0.01, 3)
            module.bias.data.normal_()
    return net.eval()


def change(net: nn.Module, x: Tensor) -> tuple[list[Pair], float]:
    """Return the equalized pairs, and the change of the outputs relative to the largest."""
    with torch.no_grad():
        before = net(x)
        pairs = equalize(net, x)
        return pairs, float((net(x) - before).abs().max() / before.abs().max())


class Groups(nn.Module):
    """Grouped and depthwise convolutions, pools and a linear layer on flattened pixels, all functional."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(3, 8, 3)
        self.depthwise = nn.Conv2d(8, 16, 3, groups=8)
        self.grouped = nn.Conv2d(16, 8, 1, groups=2)
        self.linear = nn.Linear(8 * 4, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.a(x))
        x = torch.relu_(self.depthwise(x))
        x = F.max_pool2d(F.leaky_relu(self.grouped(x), 0.1), 2)
        out: Tensor = self.linear(x.flatten(1))
        return out


class Through(nn.Module):
    """A convolution, what is between, and a second layer."""

    def __init__(self, between: nn.Module, second: nn.Module | None = None) -> None:
        super().__init__()
        self.first, self.between = nn.Conv2d(3, 4, 3), between
        self.second = second or nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.between(self.first(x)))
        return out


def test_resnet_is_equalised_through_its_batchnorms() -> None:
    pairs, difference = change(trained(CifarResNet(depth=14, width=8, in_channels=1)), torch.randn(4, 1, 8, 8))
    assert pairs == [Pair(f"blocks.{i}.conv1", f"blocks.{i}.bn1", f"blocks.{i}.conv2") for i in range(6)]
    assert difference < 1e-5


def test_ranges_of_a_channel_are_equal_on_both_sides() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4)).eval()
    first, second = net[0].weight, net[2].weight
    product = first.abs().amax(1) * second.abs().amax(0)
    equalize(net, torch.randn(2, 6))
    assert torch.allclose(first.abs().amax(1), second.abs().amax(0), rtol=1e-3)
    assert torch.allclose(first.abs().amax(1) * second.abs().amax(0), product, rtol=1e-5)


def test_grouped_and_flattened_layers() -> None:
    torch.manual_seed(0)
    pairs, difference = change(Groups().eval(), torch.randn(2, 3, 8, 8))
    assert [(pair.first, pair.second) for pair in pairs] == [
        ("a", "depthwise"),
        ("depthwise", "grouped"),
        ("grouped", "linear"),
    ]
    assert difference < 1e-5


@pytest.mark.parametrize(
    "between",
    [
        nn.ReLU6(),
        nn.SiLU(inplace=True),
        nn.Flatten(2),
        nn.BatchNorm2d(4, affine=False),
    ],
    ids=lambda module: str(module),
)
def test_what_does_not_scale_is_no_pair(between: nn.Module) -> None:
    second = nn.Linear(36, 2) if isinstance(between, nn.Flatten) else None  # 36 is a multiple of 4 channels
    assert find_pairs(Through(between, second).eval(), torch.randn(2, 3, 8, 8)) == []


@pytest.mark.parametrize("between", [nn.Sequential(nn.BatchNorm2d(4), nn.ReLU(inplace=True)), nn.Identity()])
def test_what_scales_is_a_pair(between: nn.Module) -> None:
    pairs, difference = change(trained(Through(between)), torch.randn(2, 3, 8, 8))
    assert [(pair.first, pair.second) for pair in pairs] == [("first", "second")]
    assert difference < 1e-5


def test_an_output_that_is_read_twice_is_no_pair() -> None:
    class Residual(Through):
        def forward(self, x: Tensor) -> Tensor:
            y = self.between(self.first(x))
            out: Tensor = self.second(y) + y.mean()
            return out

    class Twice(Through):
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.second(self.first(x)) + self.second(self.first(-x))
            return out

    assert find_pairs(Residual(nn.ReLU()).eval(), torch.randn(2, 3, 8, 8)) == []
    assert find_pairs(Twice(nn.ReLU()).eval(), torch.randn(2, 3, 8, 8)) == []


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


def test_means_in_parts_are_the_means() -> None:
    images, tokens = torch.randn(100, 4, 5, 5, dtype=torch.float64).float(), torch.randn(100, 7, 4)
    torch.testing.assert_close(channel_means(nn.Conv2d(1, 4, 1), images), images.double().mean((0, 2, 3)).float())
    torch.testing.assert_close(channel_means(nn.Linear(1, 4), tokens), tokens.double().mean((0, 1)).float())
