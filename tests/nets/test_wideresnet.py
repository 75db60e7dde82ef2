"""Wide blocks compute the pre-activation formula; impossible sizes are refused."""

import pytest
import torch
import torch.nn.functional as F

from lathe.errors import UserError
from lathe.nets import WideResNet
from lathe.nets.resnet import PreActivationBlock


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
