"""Each initialisation has its paper's moments."""

import math
import sys
from types import ModuleType

import pytest
import torch
from torch import nn

from lathe.errors import UserError
from lathe.nets import MLP, CifarResNet
from lathe.nets.init import apply_init


def fill_with_half(net: nn.Module) -> None:
    """Stand in for a user's initialisation."""
    for parameter in net.parameters():
        nn.init.constant_(parameter, 0.5)


def test_kaiming_normal_variances() -> None:
    torch.manual_seed(0)
    net = CifarResNet(depth=8, width=64, num_classes=100)
    apply_init(net, "kaiming_normal")
    assert net.blocks[2].conv2.weight.std().item() == pytest.approx(math.sqrt(2 / (256 * 9)), rel=0.01)
    assert net.blocks[2].conv1.weight.std().item() == pytest.approx(
        math.sqrt(2 / (256 * 9)), rel=0.01
    )  # fan-out, not 128 * 9
    assert net.head.weight.std().item() == pytest.approx(math.sqrt(1 / 256), rel=0.02)
    assert net.head.bias.abs().sum() == 0
    assert torch.equal(net.bn.weight, torch.ones(64))
    mlp = MLP(channels=1, image_size=16, num_classes=4, width=128, depth=2)
    apply_init(mlp, "kaiming_normal")
    assert mlp.stem.linear.weight.std().item() == pytest.approx(math.sqrt(2 / 256), rel=0.02)


def test_xavier_uniform_bound() -> None:
    torch.manual_seed(0)
    net = MLP(channels=1, image_size=16, num_classes=4, width=128, depth=2)
    apply_init(net, "xavier_uniform")
    bound = math.sqrt(6 / (256 + 128))
    assert bound * 0.999 < net.stem.linear.weight.abs().max().item() <= bound
    assert net.stem.linear.bias.abs().sum() == 0


def test_orthogonal_rows() -> None:
    net = CifarResNet(depth=8, width=8)
    apply_init(net, "orthogonal")
    weight = net.blocks[0].conv1.weight.flatten(1)
    torch.testing.assert_close(weight @ weight.T, 2 * torch.eye(8))
    torch.testing.assert_close(net.head.weight @ net.head.weight.T, torch.eye(10))


def test_zero_gamma_makes_blocks_start_as_their_shortcut() -> None:
    net = CifarResNet(depth=20, width=4)
    apply_init(net, ["kaiming_normal", "zero_gamma"])
    x = torch.rand(2, 4, 8, 8)
    assert torch.equal(net.blocks[0](x), x)
    assert all(torch.equal(block.bn2.weight, torch.zeros_like(block.bn2.weight)) for block in net.blocks)
    assert net.blocks[0].conv1.weight.abs().sum() > 0


def test_none_changes_nothing_and_a_dotted_path_is_a_cloners_own(monkeypatch: pytest.MonkeyPatch) -> None:
    net = MLP(channels=1, image_size=2, num_classes=3, width=4, depth=2)
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    apply_init(net, None)
    assert all(torch.equal(before[name], tensor) for name, tensor in net.state_dict().items())
    package = ModuleType("my_project")
    package.fill_with_half = fill_with_half  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "my_project", package)
    apply_init(net, "my_project.fill_with_half")
    assert torch.equal(net.head.bias, torch.full((3,), 0.5))


def test_a_typo_after_a_good_name_leaves_the_net_untouched() -> None:
    net = MLP(channels=1, image_size=2, num_classes=3, width=4, depth=2)
    before = net.head.weight.clone()
    with pytest.raises(UserError, match="did you mean orthogonal"):
        apply_init(net, ["kaiming_normal", "orthogonl"])
    assert torch.equal(net.head.weight, before)
