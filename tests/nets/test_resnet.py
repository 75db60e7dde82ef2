"""Residual blocks compute shortcut plus branch; impossible sizes are refused."""

import pytest
import torch
import torch.nn.functional as F

from lathe.errors import UserError
from lathe.nets import CifarResNet, ResNet, WideResNet
from lathe.nets.resnet import BasicBlock, Bottleneck, PreActivationBlock, ZeroPadShortcut


def test_basic_block_is_the_paper_s_formula() -> None:
    block = BasicBlock(4, 6, 2, "projection").eval()
    x = torch.rand(2, 4, 8, 8)
    branch = F.relu(block.bn1(F.conv2d(x, block.conv1.weight, stride=2, padding=1)))
    branch = block.bn2(F.conv2d(branch, block.conv2.weight, padding=1))
    shortcut = block.shortcut.bn(F.conv2d(x, block.shortcut.conv.weight, stride=2))
    torch.testing.assert_close(block(x), F.relu(branch + shortcut))


def test_bottleneck_is_the_paper_s_formula() -> None:
    block = Bottleneck(8, 2, 1, "projection").eval()
    x = torch.rand(2, 8, 8, 8)
    branch = F.relu(block.bn1(F.conv2d(x, block.conv1.weight)))
    branch = F.relu(block.bn2(F.conv2d(branch, block.conv2.weight, padding=1)))
    branch = block.bn3(F.conv2d(branch, block.conv3.weight))
    torch.testing.assert_close(block(x), F.relu(branch + x))


def test_zero_pad_shortcut_keeps_pixels_and_adds_zeros() -> None:
    x = torch.arange(1.0, 33.0).reshape(1, 2, 4, 4)
    out = ZeroPadShortcut(2, 5, 2)(x)
    assert out.shape == (1, 5, 2, 2)
    assert torch.equal(out[:, 1:3], x[:, :, ::2, ::2])
    assert out[:, 0].abs().sum() == 0
    assert out[:, 3:].abs().sum() == 0


@pytest.mark.parametrize(("depth", "parameters"), [(8, 1_233_540), (32, 7_433_860)])
def test_a_stem_of_its_own_gives_the_nets_of_the_distillation_papers(depth: int, parameters: int) -> None:
    """The counts of resnet8x4 and resnet32x4 of the CRD repository, for CIFAR-100: stem 32, stages 64, 128, 256."""
    with torch.device("meta"):
        net = CifarResNet(depth=depth, width=64, stem=32, num_classes=100)
    assert sum(parameter.numel() for parameter in net.parameters()) == parameters
    assert net(torch.empty(2, 3, 32, 32, device="meta")).shape == (2, 100)
    assert net.conv.out_channels == 32
    assert net.blocks[0].shortcut.conv.weight.shape == (64, 32, 1, 1)


@pytest.mark.parametrize("make", [lambda: CifarResNet(depth=21), lambda: ResNet(depth=20)])
def test_depths_that_no_resnet_has_are_refused(make) -> None:
    with pytest.raises(UserError, match=r"^depth=2[01] .*: take "):
        make()


# Of the nets of table 1 for 1000 classes, as torchvision publishes them.
PUBLISHED = {18: 11_689_512, 34: 21_797_672, 50: 25_557_032}


@pytest.mark.parametrize("depth", PUBLISHED)
def test_the_stem_of_imagenet_gives_the_published_nets(depth: int) -> None:
    with torch.device("meta"):
        net = ResNet(depth=depth, num_classes=1000, stem="imagenet")
        small = ResNet(depth=depth, num_classes=1000)
        image = torch.zeros(2, 3, 224, 224)
        assert net.enter(image).shape == (2, 64, 56, 56)
        assert net(image).shape == (2, 1000)
    assert sum(parameter.numel() for parameter in net.parameters()) == PUBLISHED[depth]
    # only a 3x3 window in place of 7x7
    assert PUBLISHED[depth] - sum(parameter.numel() for parameter in small.parameters()) == 64 * 3 * (49 - 9)
    assert {name for name, _ in net.named_modules()} - {name for name, _ in small.named_modules()} == {"shrink"}


@pytest.mark.parametrize(("out_channels", "stride"), [(4, 1), (6, 1), (6, 2)])
def test_block_is_the_pre_activation_formula(out_channels: int, stride: int) -> None:
    block = PreActivationBlock(4, out_channels, stride, 0.0).eval()
    x = torch.rand(2, 4, 8, 8) - 0.5
    active = F.relu(block.bn1(x))
    branch = F.conv2d(active, block.conv1.weight, stride=stride, padding=1)
    branch = F.conv2d(F.relu(block.bn2(branch)), block.conv2.weight, padding=1)
    shortcut = x if block.shortcut is None else F.conv2d(active, block.shortcut.weight, stride=stride)
    assert (block.shortcut is None) == (out_channels == 4)
    torch.testing.assert_close(block(x), branch + shortcut)


def test_a_depth_that_no_wide_resnet_has_is_refused() -> None:
    with pytest.raises(UserError, match=r"depth=20 is not 6n \+ 4"):
        WideResNet(depth=20, width=2)
