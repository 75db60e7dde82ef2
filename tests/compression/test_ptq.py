"""Post-training quantization: observed ranges, restored means, and the integers of the computation."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lathe.compression.quantization.net import LayerPlan, integer_weight, quantized_layers
from lathe.compression.quantization.ptq import (
    Pair,
    equalize,
    expected_outputs,
    find_pairs,
    overrides_of,
    quantize_dynamic,
    quantize_static,
    quantize_weights,
    tensors,
)
from lathe.nets import GPT, MLP, CifarResNet

Case = tuple[nn.Module, list[Tensor]]


@pytest.fixture
def case() -> Case:
    """A small ResNet with BatchNorm statistics of its data, and batches of inputs."""
    torch.manual_seed(0)
    net = CifarResNet(depth=8, width=4, in_channels=1)
    batches = list(torch.rand(64, 1, 8, 8).split(16))
    for _ in range(3):
        for x in batches:
            net(x)
    return net.eval(), batches


def error(net: nn.Module, was: nn.Module, batches: list[Tensor]) -> float:
    """Mean squared difference of the outputs, relative to their variance."""
    with torch.no_grad():
        x = torch.cat(batches)
        return float((net(x) - was(x)).square().mean() / was(x).var())


def test_static_int8_computes_nearly_the_same(case: Case) -> None:
    net, batches = case
    was = copy.deepcopy(net)
    done = quantize_static(net, batches)
    assert done.layers == list(quantized_layers(net))
    assert {"conv", "blocks.1.shortcut.conv", "blocks.0.add", "head"} <= set(done.layers)
    assert 0 < error(net, was, batches) < 2e-3
    assert [name for name, _ in net.named_parameters()] == [name for name, _ in was.named_parameters()]


def test_bias_correction_restores_means(case: Case) -> None:
    net, batches = case
    plan = LayerPlan(weight_bits=3)
    corrected, plain = copy.deepcopy(net), copy.deepcopy(net)
    quantize_static(plain, batches, plan)
    done = quantize_static(corrected, batches, plan, bias_correction=True)
    assert done.corrected["bias"] == ["head"]
    assert sorted(done.corrected["batchnorm"]) == sorted(
        name for name in expected_outputs(net, batches[0]) if name != "head"
    )
    assert done.corrected["uncorrected"] == []
    x = torch.cat(batches)
    with torch.no_grad():
        assert (
            (corrected(x).mean(0) - net(x).mean(0)).abs().max() < 1e-4 < (plain(x).mean(0) - net(x).mean(0)).abs().max()
        )
    assert error(corrected, net, batches) < error(plain, net, batches)


def test_equalisation_comes_first(case: Case) -> None:
    net, batches = case
    with torch.no_grad():
        net.blocks[0].bn1.weight[0] = 50  # one channel takes the whole range of the tensor
    plan = LayerPlan(weight_bits=8, activation_bits=4)
    equal, plain = copy.deepcopy(net), copy.deepcopy(net)
    assert quantize_static(plain, batches, plan).pairs == []
    pairs = quantize_static(equal, batches, plan, equalization=True).pairs
    assert [pair.first for pair in pairs] == [f"blocks.{i}.conv1" for i in range(3)]
    assert error(equal, net, batches) < error(plain, net, batches)


def test_dynamic_quantization_is_of_linear_layers_with_the_range_of_each_batch(case: Case) -> None:
    assert quantize_dynamic(case[0], case[1][0]).layers == ["head"]
    net, (x, *_) = small()
    was = copy.deepcopy(net)
    done = quantize_dynamic(net, x, LayerPlan(), overrides_of(LayerPlan(activation="dynamic"), {"head": 4}))
    assert done.layers == ["stem.linear", "blocks.0.linear", "head"]
    assert net.head.weight_quantizer.bits == 4
    with torch.no_grad():
        for scale in (1, 1000):  # a static range of the first batch would clip the second
            assert (net(scale * x) - was(scale * x)).abs().max() < 0.1 * was(scale * x).abs().max()
            assert not torch.equal(net(scale * x), was(scale * x))


def small() -> tuple[nn.Module, list[Tensor]]:
    torch.manual_seed(0)
    return MLP(channels=1, image_size=4, num_classes=3, width=8, depth=2).eval(), list(torch.rand(32, 1, 4, 4).split(8))


def test_outputs_are_those_of_the_rounded_weights() -> None:
    net, batches = small()
    was = copy.deepcopy(net)
    assert quantize_weights(net, batches).layers == ["stem.linear", "blocks.0.linear", "head"]
    for name in ("stem.linear", "blocks.0.linear", "head"):
        plain, rounded = was.get_submodule(name), net.get_submodule(name)
        weight, scale = integer_weight(rounded)
        assert torch.allclose(scale, plain.weight.detach().abs().amax(1) / 127)
        assert torch.equal(weight, (plain.weight / scale.view(-1, 1)).round().to(torch.int8))
        with torch.no_grad():
            plain.weight.copy_(weight * scale.view(-1, 1))
    with torch.no_grad():
        assert torch.allclose(net(batches[0]), was(batches[0]), atol=1e-6)


def test_groups_along_the_input_share_a_scale() -> None:
    net, batches = small()
    was = copy.deepcopy(net)
    quantize_weights(net, batches, LayerPlan(weight_bits=4, group_size=4))
    weight, scale = integer_weight(net.head)
    groups = was.head.weight.detach().view(3, 2, 4)
    assert torch.allclose(scale, groups.abs().amax(2) / 7)
    assert torch.equal(weight.view(3, 2, 4), (groups / scale.unsqueeze(-1)).round().to(torch.int8))
    assert int(weight.abs().max()) == 7


def test_convolutions_and_what_does_not_divide() -> None:
    net, x = CifarResNet(depth=8, width=4, in_channels=1).eval(), torch.rand(4, 1, 8, 8)
    done = quantize_weights(net, [x], LayerPlan(weight_bits=4, group_size=12), bias_correction=True)
    assert len(done.layers) == 1 + 3 * 2 + 2 + 1  # residual sums have no weights
    assert integer_weight(net.blocks[0].conv1)[1].shape == (4, 3)  # 4 channels of 3x3 pixels are 3 groups of 12
    assert integer_weight(net.conv)[1].shape == (4,)  # 9 are not
    assert len(done.corrected["batchnorm"]) == 9


def test_embeddings_too() -> None:
    net = GPT(vocab_size=16, max_length=8, width=8, depth=1, heads=2).eval()
    tokens = torch.randint(16, (4, 8))
    was = net(tokens).detach()
    done = quantize_weights(net, [tokens], bias_correction=True)
    assert any(isinstance(net.get_submodule(name), nn.Embedding) for name in done.layers)
    assert (net(tokens) - was).abs().max() < 0.05 * was.abs().max()


def trained(net: nn.Module) -> nn.Module:
    """Return the net with BatchNorm statistics and weights as after training: no two channels are equal."""
    torch.manual_seed(0)
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
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
        return self.linear(x.flatten(1))


class Through(nn.Module):
    """A convolution, what is between, and a second layer."""

    def __init__(self, between: nn.Module, second: nn.Module | None = None) -> None:
        super().__init__()
        self.first, self.between = nn.Conv2d(3, 4, 3), between
        self.second = second or nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.between(self.first(x)))


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
            return self.second(y) + y.mean()

    class Twice(Through):
        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x)) + self.second(self.first(-x))

    assert find_pairs(Residual(nn.ReLU()).eval(), torch.randn(2, 3, 8, 8)) == []
    assert find_pairs(Twice(nn.ReLU()).eval(), torch.randn(2, 3, 8, 8)) == []


def test_tensors_in_subclasses_of_containers_are_seen() -> None:
    class Output(dict):
        pass

    class Rows(list):
        pass

    first, second = torch.zeros(1), torch.zeros(2)
    assert [id(tensor) for tensor in tensors(Output(a=Rows([first]), b=(second, None)))] == [id(first), id(second)]
