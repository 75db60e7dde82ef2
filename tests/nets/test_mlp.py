"""Perceptrons compute their layers' formulas."""

import torch
import torch.nn.functional as F

from lathe.nets import MLP, DeepMLP


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


def test_the_deep_stack_is_linear_layer_norm_and_gelu() -> None:
    net = DeepMLP(channels=2, image_size=3, num_classes=4, width=5, depth=2)
    x = torch.rand(6, 2, 3, 3)
    hidden = x.reshape(6, 18)
    for layer in (net.stem, *net.blocks):
        hidden = F.gelu(F.layer_norm(F.linear(hidden, layer.linear.weight, layer.linear.bias), (5,)))
    torch.testing.assert_close(net(x), F.linear(hidden, net.head.weight, net.head.bias))
