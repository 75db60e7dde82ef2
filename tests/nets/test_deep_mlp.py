"""The plain stack computes Linear, LayerNorm, GELU, as many times as its depth says."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lathe.errors import UserError
from lathe.nets import DeepMLP


def test_forward_is_the_stack() -> None:
    net = DeepMLP(channels=2, image_size=3, num_classes=4, width=5, depth=2)
    x = torch.rand(6, 2, 3, 3)
    hidden = x.reshape(6, 18)
    for layer in (net.stem, *net.blocks):
        hidden = F.gelu(F.layer_norm(F.linear(hidden, layer.linear.weight, layer.linear.bias), (5,)))
    torch.testing.assert_close(net(x), F.linear(hidden, net.head.weight, net.head.bias))


def test_depth_is_the_number_of_blocks() -> None:
    net = DeepMLP(channels=1, image_size=2, num_classes=3, width=4, depth=64)
    assert len(net.blocks) == 64
    assert sum(parameter.numel() for parameter in net.parameters()) == (4 + 3) * 4 + 64 * (4 + 3) * 4 + (4 + 1) * 3


def test_dropout_acts_in_training_only() -> None:
    net = DeepMLP(channels=1, image_size=8, num_classes=4, width=64, depth=2, dropout=0.5)
    x = torch.rand(2, 1, 8, 8)
    assert not torch.equal(net(x), net(x))
    net.eval()
    assert torch.equal(net(x), net(x))


def test_the_plan_gathers_each_layer_in_front_of_its_norm() -> None:
    net = DeepMLP(channels=1, image_size=2, num_classes=3, width=4, depth=2)
    assert net.tensor_plan == {"stem.linear": "gather", "blocks.*.linear": "gather"}
    assert all(isinstance(net.get_submodule(name.replace("*", "1")), nn.Linear) for name in net.tensor_plan)
    assert net.tensor_limits == {"width": 4}


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        ("width", 0, "width=0: expected a whole number from 1, got one out of this range."),
        ("depth", 0, "depth=0: expected a whole number from 1, got one out of this range."),
        (
            "dropout",
            -0.5,
            "dropout=-0.5: expected a number from 0 and below 1, got one out of this range.",
        ),
    ],
)
def test_bad_sizes_are_refused_in_one_sentence(key: str, value: float, sentence: str) -> None:
    sizes = {"channels": 1, "image_size": 8, "num_classes": 4, "width": 5, "depth": 2, key: value}
    with pytest.raises(UserError) as caught:
        DeepMLP(**sizes)
    assert str(caught.value) == sentence
