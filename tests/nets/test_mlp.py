"""The perceptron computes what its layers say."""

import pytest
import torch

from lathe.errors import UserError
from lathe.nets import MLP


def test_forward_is_relu_of_affine_maps() -> None:
    net = MLP(channels=2, image_size=3, num_classes=4, width=5, depth=2)
    x = torch.rand(6, 2, 3, 3)
    hidden = x.reshape(6, 18)
    for layer in (net.stem.linear, net.blocks[0].linear):
        hidden = (hidden @ layer.weight.T + layer.bias).clamp(min=0)
    torch.testing.assert_close(net(x), hidden @ net.head.weight.T + net.head.bias)


def test_depth_one_has_no_blocks() -> None:
    net = MLP(channels=1, image_size=8, num_classes=4, width=5, depth=1)
    assert len(net.blocks) == 0
    assert net(torch.rand(2, 1, 8, 8)).shape == (2, 4)


def test_dropout_acts_in_training_only() -> None:
    net = MLP(channels=1, image_size=8, num_classes=4, width=64, depth=2, dropout=0.5)
    x = torch.rand(2, 1, 8, 8)
    assert not torch.equal(net(x), net(x))
    net.eval()
    assert torch.equal(net(x), net(x))


@pytest.mark.parametrize(
    ("depth", "plan"),
    [
        (1, {"stem.linear": "column", "head": "row"}),
        (2, {"stem.linear": "column", "blocks.0.linear": "row"}),
        (3, {"stem.linear": "column", "blocks.0.linear": "row", "blocks.1.linear": "column", "head": "row"}),
    ],
)
def test_the_plan_cuts_layers_in_pairs(depth: int, plan: dict[str, str]) -> None:
    net = MLP(channels=1, image_size=8, num_classes=4, width=6, depth=depth)
    assert net.tensor_plan == plan
    assert net.tensor_limits == {"width": 6}


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        ("width", 0, "width=0: expected a whole number from 1, got one out of this range."),
        ("depth", 1.5, "depth=1.5: expected a whole number from 1, got a number."),
        ("width", True, "width=true: expected a whole number from 1, got true or false."),
        (
            "dropout",
            1.0,
            "dropout=1.0: expected a number from 0 and below 1, got one out of this range.",
        ),
    ],
)
def test_bad_sizes_are_refused_in_one_sentence(key: str, value: float, sentence: str) -> None:
    sizes = {"channels": 1, "image_size": 8, "num_classes": 4, "width": 5, "depth": 2, key: value}
    with pytest.raises(UserError) as caught:
        MLP(**sizes)
    assert str(caught.value) == sentence
