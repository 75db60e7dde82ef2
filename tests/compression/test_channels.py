"""Dependent channels of a net, their choice and their removal."""

import copy
import json
import warnings
from typing import get_args

import pytest
import torch
from torch import nn

from lathe.compression.channels import prune_channels, removal
from lathe.compression.channels.removal import (
    add_penalty,
    find_groups,
    head_groups,
    layers,
    loss_change,
    parameters,
    scores,
    silence,
)
from lathe.config.types import ChannelImportance
from lathe.errors import UserError
from lathe.measure import count_flops
from lathe.nets import GPT, CifarResNet, ViT

IMAGES = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
TOKENS = torch.randint(0, 20, (2, 8), generator=torch.Generator().manual_seed(0))
NETS = {
    "resnet": lambda: (CifarResNet(depth=8, width=8), IMAGES),
    "vit": lambda: (
        ViT(channels=3, image_size=16, num_classes=10, patch_size=4, width=32, depth=2, heads=4, pool="token"),
        IMAGES,
    ),
    "gpt": lambda: (GPT(vocab_size=20, max_length=8, width=32, depth=2, heads=4), TOKENS),
    "plain": lambda: (
        nn.Sequential(
            nn.Conv2d(3, 6, 3),
            nn.ReLU(),
            nn.Conv2d(6, 6, 3, groups=6),
            nn.BatchNorm2d(6),
            nn.Flatten(),
            nn.Linear(864, 5),
        ),
        IMAGES,
    ),
}


def make(name: str) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    net, example = NETS[name]()
    with torch.no_grad():  # as if trained: no norm has its initial values
        for name, buffer in net.named_buffers():
            if name.endswith("running_mean"):
                buffer.normal_()
            elif name.endswith("running_var"):
                buffer.uniform_(0.5, 2)
        for parameter in net.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return net.eval(), example


@pytest.mark.parametrize("name", NETS)
def test_silent_units_are_removed_without_a_trace_and_a_fresh_net_gets_the_same_shapes(name):
    net, example = make(name)
    assert removal.describe(net) == {}
    groups = find_groups(net, example)
    chosen = {group.name: list(range(0, group.units, 3)) for group in groups}
    silence(net, groups, chosen)
    expected, fresh = net(example), copy.deepcopy(net)
    removal.remove(net, groups, chosen)
    torch.testing.assert_close(net(example), expected, rtol=1e-5, atol=1e-5)
    assert sum(p.numel() for p in net.parameters()) < 0.8 * sum(p.numel() for p in fresh.parameters())
    description = json.loads(json.dumps(removal.describe(net)))
    removal.rebuild(fresh, description)
    fresh.load_state_dict(net.state_dict())
    assert torch.equal(fresh(example), net(example))
    assert removal.describe(fresh) == removal.describe(net) == removal.describe(copy.deepcopy(net)) == description
    own = [(type(a), a.extra_repr()) for a in net.modules()]
    assert own == [(type(b), b.extra_repr()) for b in fresh.modules()]


def test_scales_of_quantized_weights_go_with_their_channels():
    net, example = make("resnet")
    groups = find_groups(net, example)
    layer = net.blocks[0].conv1
    layer.weight_quantizer = nn.Module()
    layer.weight_quantizer.register_buffer("scale", torch.arange(8.0))
    layer.weight_quantizer.register_buffer("enabled", torch.tensor(1))
    group = next(group for group in groups if group.name == "blocks.0.conv1")
    removal.remove(net, groups, {group.name: [0, 3]})
    assert layer.weight_quantizer.scale.tolist() == [1, 2, 4, 5, 6, 7]
    assert all("quantizer" not in name for name in removal.describe(net)["tensors"])


def test_another_net_is_refused():
    net, example = make("resnet")
    groups = find_groups(net, example)
    removal.remove(net, groups, {group.name: [0] for group in groups})
    with pytest.raises(UserError, match=r"The structure.* of another net"):
        removal.rebuild(make("vit")[0], removal.describe(net))


def test_a_residual_stream_is_one_group_and_a_block_has_one_of_its_own():
    net = CifarResNet(depth=8, width=4).train()
    before = copy.deepcopy(net.state_dict())
    groups = {group.name: group for group in find_groups(net, IMAGES)}
    assert net.training
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
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


@pytest.mark.parametrize(
    ("net", "example"),
    [
        (Shuffled(), torch.randn(2, 4)),
        (Offset(), torch.randn(2, 4)),
        (CifarResNet(depth=8, width=4, shortcut="zero_pad"), IMAGES),
    ],
    ids=["shuffled", "offset", "padded"],
)
def test_channels_that_cant_be_followed_are_refused(net, example):
    with pytest.raises(UserError, match=rf"How {type(net).__name__} joins its channels can't be followed"):
        find_groups(net, example)


@pytest.fixture
def net() -> nn.Module:
    torch.manual_seed(0)
    net = CifarResNet(depth=8, width=8)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return net


@pytest.mark.parametrize(("budget", "share"), [("macs", 0.2), ("parameters", 0.5)])
def test_a_budget_is_kept_and_nearly_used_up(net, budget, share):
    dense = copy.deepcopy(net)
    left = prune_channels(net, IMAGES, budget=budget, share=share, min_channels=1, round_to=1)
    assert left["macs"] == count_flops(net, IMAGES) / count_flops(dense, IMAGES)
    assert left["parameters"] == parameters(net) / parameters(dense)
    assert share - 0.05 < left[budget] <= share
    assert net(IMAGES).shape == (2, 10)


def test_a_budget_out_of_reach_is_refused(net):
    with pytest.raises(UserError, match=r"share=0\.01: the fewest channels that may remain cost 0\.\d+"):
        prune_channels(net, IMAGES, share=0.01, min_channels=4)


def test_group_norm_is_torch_prunings(net):
    import torch_pruning as tp

    graph = tp.DependencyGraph().build_dependency(net, IMAGES, forward_fn=lambda net, x: net(x))
    theirs = {}
    for group in graph.get_all_groups(ignored_layers=[net.head]):
        names = {module: name for name, module in net.named_modules()}
        theirs[names[group[0].dep.target.module]] = tp.importance.GroupMagnitudeImportance(p=2)(group)
    ours = scores(find_groups(net, IMAGES), dict(net.named_parameters()))
    assert ours.keys() == theirs.keys()
    for name, score in ours.items():
        torch.testing.assert_close(score, theirs[name])


def test_the_penalty_is_torch_prunings(net):
    import torch_pruning as tp

    def gradients(push):
        net.zero_grad()
        net.train()(IMAGES).sum().backward()
        before = {name: p.grad.clone() for name, p in net.named_parameters()}
        push()
        return {name: p.grad - before[name] for name, p in net.named_parameters()}

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pruner = tp.pruner.GroupNormPruner(
            net,
            IMAGES,
            tp.importance.GroupMagnitudeImportance(),
            reg=0.1,
            ignored_layers=[net.head],
            in_channel_groups={},
            out_channel_groups={},
            num_heads={},
            forward_fn=lambda net, x: net(x),
        )
        theirs = gradients(lambda: pruner.regularize(net))
    groups = find_groups(net, IMAGES)
    ours = gradients(lambda: add_penalty(net, groups, "group_norm", 0.1))
    for name, change in theirs.items():
        torch.testing.assert_close(ours[name], change, rtol=1e-4, atol=1e-5)


def test_other_penalties_push_as_their_formulas_say(net):
    groups = find_groups(net, IMAGES)
    group = next(group for group in groups if group.name == "blocks.0.conv1")
    net(IMAGES).sum().backward()
    before = {name: p.grad.clone() for name, p in net.named_parameters()}
    block = net.blocks[0]
    add_penalty(net, [group], "bn_scale", 0.1)
    torch.testing.assert_close(
        block.bn1.weight.grad - before["blocks.0.bn1.weight"], 0.1 * block.bn1.weight.detach().sign()
    )
    assert torch.equal(block.conv1.weight.grad, before["blocks.0.conv1.weight"])
    net.zero_grad()
    net(IMAGES).sum().backward()
    add_penalty(net, [group], "group_lasso", 0.1)
    norm = (block.conv1.weight**2).sum((1, 2, 3)) + (block.conv2.weight**2).sum((0, 2, 3)) + block.bn1.weight**2
    expected = 0.1 * block.conv1.weight / norm.sqrt().view(-1, 1, 1, 1)
    pushed = block.conv1.weight.grad - before["blocks.0.conv1.weight"]
    torch.testing.assert_close(pushed, expected.detach(), rtol=1e-2, atol=1e-4)


def test_each_importance_ranks_as_its_paper_does(net):
    groups = [group for group in find_groups(net, IMAGES) if group.name == "blocks.0.conv1"]
    block, tensors = net.blocks[0], dict(net.named_parameters())
    net(IMAGES).logsumexp(1).sum().backward()
    gradients = {name: p.grad for name, p in tensors.items()}
    sensitivity = loss_change(groups, tensors, gradients)
    makers = (block.conv1.weight, block.bn1.weight, block.bn1.bias)
    rows = block.conv1.weight.detach().flatten(1)
    expected = {
        "l1": rows.abs().sum(1),
        "l2": rows.norm(dim=1),
        "bn_scale": block.bn1.weight.detach().abs(),
        "taylor": sum((p * p.grad).detach().view(8, -1).sum(1) for p in makers).square(),
    }
    for importance, values in expected.items():
        score = scores(groups, tensors, importance, sensitivity=sensitivity)["blocks.0.conv1"]
        torch.testing.assert_close(score, values / values.mean())
    draws = [scores(groups, tensors, "random", seed=seed)["blocks.0.conv1"] for seed in (3, 3, 4)]
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])
    assert expected.keys() | {"group_norm", "random"} == set(get_args(ChannelImportance))


def test_a_latency_budget_is_kept(monkeypatch):
    monkeypatch.setattr(removal, "latency_share", lambda small, dense, example: parameters(small) / parameters(dense))
    net = CifarResNet(depth=8, width=8)
    assert 0.45 < prune_channels(net, IMAGES, budget="latency", share=0.5, round_to=1)["parameters"] <= 0.5
