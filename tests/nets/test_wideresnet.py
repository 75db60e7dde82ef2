"""Wide blocks compute the pre-activation formula; sizes that no such net has are refused."""

import pytest
import torch
import torch.nn.functional as F

from lathe.errors import UserError
from lathe.nets import WideResNet
from lathe.nets.wideresnet import PreActivationBlock


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


def test_dropout_acts_in_training_only() -> None:
    block = PreActivationBlock(4, 4, 1, 0.5)
    x = torch.rand(2, 4, 8, 8)
    assert not torch.equal(block(x), block(x))
    block.eval()
    assert torch.equal(block(x), block(x))


@pytest.mark.parametrize(
    ("sizes", "sentence"),
    [
        ({"depth": 20, "width": 2}, "depth=20 is not 6n + 4, which a WideResNet needs: take 16 or 22."),
        ({"depth": 16, "width": 0.5}, "width=0.5: expected a whole number from 1, got a number."),
        (
            {"depth": 16, "width": 2, "dropout": -0.1},
            "dropout=-0.1: expected a number from 0 and below 1, got one out of this range.",
        ),
    ],
)
def test_bad_sizes_are_refused_in_one_sentence(sizes: dict, sentence: str) -> None:
    with pytest.raises(UserError) as caught:
        WideResNet(**sizes)
    assert str(caught.value) == sentence
