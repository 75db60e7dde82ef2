"""Pruned shapes can be saved and rebuilt, without the data and the library that chose them."""

import copy
import json

import pytest
import torch
from torch import nn

from lathe.compression.channels import slices
from lathe.compression.channels.groups import find_groups
from lathe.compression.channels.slices import silence
from lathe.errors import UserError
from lathe.nets import GPT, CifarResNet, ResNet, ViT, WideResNet

IMAGES = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
TOKENS = torch.randint(0, 20, (2, 8), generator=torch.Generator().manual_seed(0))
NETS = {
    "resnet": lambda: (CifarResNet(depth=8, width=8), IMAGES),
    "bottleneck": lambda: (ResNet(depth=50, width=4), IMAGES),
    "pre-activation": lambda: (WideResNet(depth=10, width=1), IMAGES),
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
def test_silent_units_can_be_removed_without_a_trace(name):
    net, example = make(name)
    groups = find_groups(net, example)
    chosen = {group.name: list(range(0, group.units, 3)) for group in groups}
    silence(net, groups, chosen)
    expected, before = net(example), sum(p.numel() for p in net.parameters())
    slices.remove(net, groups, chosen)
    torch.testing.assert_close(net(example), expected, rtol=1e-5, atol=1e-5)
    assert sum(p.numel() for p in net.parameters()) < 0.8 * before


@pytest.mark.parametrize("name", NETS)
def test_a_description_gives_a_fresh_net_the_same_shapes(name):
    net, example = make(name)
    fresh = copy.deepcopy(net)
    assert slices.describe(net) == {}
    groups = find_groups(net, example)
    slices.remove(net, groups, {group.name: [0, group.units - 1] for group in groups})
    description = json.loads(json.dumps(slices.describe(net)))
    slices.rebuild(fresh, description)
    fresh.load_state_dict(net.state_dict())
    assert torch.equal(fresh(example), net(example))
    assert slices.describe(fresh) == slices.describe(net) == slices.describe(copy.deepcopy(net)) == description
    own = [(type(a), a.extra_repr()) for a in net.modules()]
    assert own == [(type(b), b.extra_repr()) for b in fresh.modules()]


def test_a_second_removal_adds_to_the_description():
    net, example = make("resnet")
    fresh = copy.deepcopy(net)
    for _ in range(2):
        groups = find_groups(net, example)
        slices.remove(net, groups, {group.name: [0] for group in groups})
    slices.rebuild(fresh, slices.describe(net))
    fresh.load_state_dict(net.state_dict())
    assert fresh.conv.out_channels == 6
    assert torch.equal(fresh(example), net(example))


def test_a_tied_weight_stays_tied():
    net, example = make("gpt")
    groups = find_groups(net, example)
    slices.remove(net, groups, {group.name: [1] for group in groups})
    slices.rebuild(fresh := make("gpt")[0], slices.describe(net))
    assert net.head.weight is net.embed.token.weight
    assert fresh.head.weight is fresh.embed.token.weight


def test_scales_of_quantized_weights_go_with_their_channels():
    net, example = make("resnet")
    groups = find_groups(net, example)
    layer = net.blocks[0].conv1
    layer.weight_quantizer = nn.Module()
    layer.weight_quantizer.register_buffer("scale", torch.arange(8.0))
    layer.weight_quantizer.register_buffer("enabled", torch.tensor(1))
    group = next(group for group in groups if group.name == "blocks.0.conv1")
    slices.remove(net, groups, {group.name: [0, 3]})
    assert layer.weight_quantizer.scale.tolist() == [1, 2, 4, 5, 6, 7]
    assert all("quantizer" not in name for name in slices.describe(net)["tensors"])


def test_another_net_is_refused():
    net, example = make("resnet")
    groups = find_groups(net, example)
    slices.remove(net, groups, {group.name: [0] for group in groups})
    with pytest.raises(UserError, match=r"The structure.* of another net"):
        slices.rebuild(make("vit")[0], slices.describe(net))


def test_removal_keeps_the_other_weights() -> None:
    net, example = NETS["resnet"]()
    groups = find_groups(net, example)
    chosen = {group.name: list(range(1, group.units, 3)) for group in groups}
    gone, before = slices.positions(groups, chosen), {name: p.detach().clone() for name, p in net.named_parameters()}
    slices.remove(net, groups, chosen)
    for name, parameter in net.named_parameters():
        assert torch.equal(before[name][slices.staying(before[name].shape, gone.get(name, {}))], parameter), name
