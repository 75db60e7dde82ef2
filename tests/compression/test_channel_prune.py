"""A budget is kept with the fewest removals, in the papers' order."""

import copy
import warnings
from typing import get_args

import pytest
import torch
from torch import nn

from lathe.compression.channels import choice, prune_channels
from lathe.compression.channels.choice import add_penalty, loss_change, parameters, scores
from lathe.compression.channels.groups import find_groups
from lathe.config.types import ChannelImportance
from lathe.errors import UserError
from lathe.measure import count_flops
from lathe.nets import CifarResNet, ViT

IMAGES = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def net() -> nn.Module:
    torch.manual_seed(0)
    net = CifarResNet(depth=8, width=8)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return net


@pytest.mark.parametrize("budget", ["macs", "parameters"])
@pytest.mark.parametrize("share", [0.5, 0.2])
def test_a_budget_is_kept_and_nearly_used_up(net, budget, share):
    dense = copy.deepcopy(net)
    left = prune_channels(net, IMAGES, budget=budget, share=share, min_channels=1, round_to=1)
    assert left["macs"] == count_flops(net, IMAGES) / count_flops(dense, IMAGES)
    assert left["parameters"] == parameters(net) / parameters(dense)
    assert share - 0.05 < left[budget] <= share
    assert net(IMAGES).shape == (2, 10)


def test_heads_of_a_transformer_go_too():
    torch.manual_seed(0)
    net = ViT(channels=3, image_size=16, num_classes=4, patch_size=4, width=32, depth=2, heads=4)
    left = prune_channels(net, IMAGES, share=0.4)
    kept = [block.attention.q.out_features // block.attention.head_dim for block in net.blocks]
    assert left["macs"] <= 0.4
    assert net.blocks[0].attention.out.in_features == 8 * kept[0]
    assert net.blocks[0].attention.out.out_features == 32
    assert sum(kept) < 8
    assert net(IMAGES).shape == (2, 4)


def test_what_remains_is_rounded_and_no_layer_is_emptied(net):
    prune_channels(net, IMAGES, share=0.3, round_to=4, min_channels=4)
    sizes = [module.out_channels for module in net.modules() if isinstance(module, nn.Conv2d)]
    assert all(size % 4 == 0 and size >= 4 for size in sizes)


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
    taylor = (
        sum(
            (p * p.grad).flatten(1).sum(1) if p.dim() > 1 else p * p.grad
            for p in (block.conv1.weight, block.bn1.weight, block.bn1.bias)
        )
        ** 2
    )
    rows = block.conv1.weight.detach().flatten(1)
    expected = {
        "l1": rows.abs().sum(1),
        "l2": rows.norm(dim=1),
        "bn_scale": block.bn1.weight.detach().abs(),
        "taylor": taylor.detach(),
    }
    for importance, values in expected.items():
        found = scores(groups, tensors, importance, sensitivity=sensitivity)["blocks.0.conv1"]
        torch.testing.assert_close(found, values / values.mean())
    same = [scores(groups, tensors, "random", seed=seed)["blocks.0.conv1"] for seed in (3, 3, 4)]
    assert torch.equal(same[0], same[1])
    assert not torch.equal(same[0], same[2])
    known = get_args(ChannelImportance)
    assert set(expected) | {"group_norm", "random"} == set(known)


def test_a_latency_budget_is_kept(monkeypatch):
    monkeypatch.setattr(choice, "latency_share", lambda small, dense, example: parameters(small) / parameters(dense))
    net = CifarResNet(depth=8, width=8)
    assert 0.45 < prune_channels(net, IMAGES, budget="latency", share=0.5, round_to=1)["parameters"] <= 0.5
