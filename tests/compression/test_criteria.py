"""Scores match the papers' formulas, by hand."""

import pytest
import torch
from torch import nn

from lathe.compression.pruning import criteria, make_masks, maskable
from lathe.errors import UserError
from lathe.nets import CifarResNet


def test_random_depends_on_seed_step_and_name_alone() -> None:
    a, b = torch.zeros(4, 4), torch.zeros(4, 4)
    one = criteria.random({"a": a, "b": b}, seed=1, step=3)
    torch.manual_seed(99)
    again = criteria.random({"b": b}, seed=1, step=3)
    assert torch.equal(one["b"], again["b"])
    others = [one["a"], *(criteria.random({"b": b}, seed, step)["b"] for seed, step in ((2, 3), (1, 4)))]
    assert not any(torch.equal(other, one["b"]) for other in others)
    assert ((one["a"] >= 0) & (one["a"] < 1)).all()


def test_taylor_and_movement_add_up_products() -> None:
    weight, gradients = (
        torch.tensor([1.0, -2.0, 3.0]),
        (torch.tensor([1.0, 1.0, -1.0]), torch.tensor([0.5, -1.0, torch.inf])),
    )
    taylor, movement = {"a": torch.zeros(3)}, {"a": torch.zeros(3)}
    for gradient in gradients:
        criteria.add_gradients(taylor, {"a": weight}, {"a": gradient}, "taylor")
        criteria.add_gradients(movement, {"a": weight}, {"a": gradient}, "movement")
    criteria.add_gradients(taylor, {"a": weight}, {"a": None}, "taylor")
    assert taylor["a"].tolist() == [1.5, 4.0, 3.0]
    assert movement["a"].tolist() == [-1.5, 0.0, 3.0]  # the first two move towards zero


def test_wanda_by_hand() -> None:
    net = nn.Sequential(nn.Linear(2, 2, bias=False))
    with torch.no_grad():
        net[0].weight.copy_(torch.tensor([[1.0, -1.0], [2.0, 3.0]]))
        with criteria.input_squares(net, ["0.weight"]) as squares:
            net(torch.tensor([[3.0, 0.0], [4.0, 1.0]]))
            net(torch.tensor([[[0.0, 1.0]]]))
    scores = criteria.wanda(dict(net.named_parameters()), squares)
    assert torch.allclose(scores["0.weight"], torch.tensor([[5.0, 2**0.5], [10.0, 3 * 2**0.5]]))
    assert not net[0]._forward_pre_hooks


def test_batchnorm_scales_are_those_behind_each_layer() -> None:
    net = CifarResNet(depth=8, width=4)
    parameters = maskable(net)
    assert criteria.batchnorms(net, parameters)["blocks.1.shortcut.conv.weight"] == "blocks.1.shortcut.bn.weight"
    with torch.no_grad():
        net.blocks[0].bn1.weight.copy_(torch.tensor([0.1, -5.0, 0.2, 1.0]))
    scores = criteria.batchnorm_scale(net, parameters)
    mask = make_masks({"a": scores["blocks.0.conv1.weight"]}, 0.5, granularity="structured")["a"]
    assert mask.flatten(1).any(1).tolist() == [False, True, False, True]
    with pytest.raises(UserError, match=r"no BatchNorm of 2 channels follows 0\.weight"):
        criteria.batchnorm_scale(nn.Sequential(nn.Linear(3, 2)), {"0.weight": torch.zeros(2, 3)})


def test_wanda_of_grouped_convolutions() -> None:
    net = nn.Sequential(nn.Conv2d(4, 6, 3, groups=2))
    x = torch.rand(5, 4, 7, 7)
    with criteria.input_squares(net, ["0.weight"]) as squares, torch.no_grad():
        net(x)
    norms = x.square().sum((0, 2, 3)).sqrt()
    scores = criteria.wanda({"0.weight": torch.ones(6, 2, 3, 3)}, squares)["0.weight"]
    assert torch.allclose(scores[0, :, 0, 0], norms[:2])
    assert torch.allclose(scores[5, :, 2, 2], norms[2:])
    masks = make_masks({"0.weight": scores}, 0.5, scope="output")
    assert (masks["0.weight"].flatten(1).sum(1) == 9).all()
