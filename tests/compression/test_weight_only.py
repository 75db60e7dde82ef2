"""Weights alone become integers: their scales, groups and means."""

import copy

import pytest
import torch
from torch import Tensor, nn

from lathe.compression.quantization.net import LayerPlan, integer_weight
from lathe.compression.quantization.ptq import overrides_of
from lathe.compression.quantization.weight_only import quantize_weights
from lathe.errors import UserError
from lathe.nets import GPT, MLP, CifarResNet


def small() -> tuple[nn.Module, list[Tensor]]:
    torch.manual_seed(0)
    return MLP(channels=1, image_size=4, num_classes=3, width=8, depth=2).eval(), list(torch.rand(32, 1, 4, 4).split(8))


def test_outputs_are_those_of_the_rounded_weights() -> None:
    net, batches = small()
    was = copy.deepcopy(net)
    assert quantize_weights(net, batches).layers == ["stem.linear", "blocks.0.linear", "head"]
    for name in ("stem.linear", "blocks.0.linear", "head"):
        plain, rounded = was.get_submodule(name), net.get_submodule(name)
        weight, scale = integer_weight(rounded)
        assert torch.allclose(scale, plain.weight.detach().abs().amax(1) / 127)  # type: ignore[operator,union-attr]
        assert torch.equal(weight, (plain.weight / scale.view(-1, 1)).round().to(torch.int8))  # type: ignore[operator]
        with torch.no_grad():
            plain.weight.copy_(weight * scale.view(-1, 1))  # type: ignore[operator,union-attr]
    with torch.no_grad():
        assert torch.allclose(net(batches[0]), was(batches[0]), atol=1e-6)


def test_groups_along_the_input_share_a_scale() -> None:
    net, batches = small()
    was = copy.deepcopy(net)
    quantize_weights(net, batches, LayerPlan(weight_bits=4, group_size=4))
    weight, scale = integer_weight(net.head)  # type: ignore[arg-type]
    groups = was.head.weight.detach().view(3, 2, 4)  # type: ignore[operator,union-attr]
    assert torch.allclose(scale, groups.abs().amax(2) / 7)
    assert torch.equal(weight.view(3, 2, 4), (groups / scale.unsqueeze(-1)).round().to(torch.int8))
    assert int(weight.abs().max()) == 7


def test_smaller_groups_and_bias_correction_come_nearer() -> None:
    net, batches = small()
    x = torch.cat(batches)

    def error(plan: LayerPlan, bias_correction: bool = False) -> float:
        rounded = copy.deepcopy(net)
        quantize_weights(rounded, batches, plan, bias_correction=bias_correction)
        with torch.no_grad():
            return float((rounded(x) - net(x)).square().mean())

    assert error(LayerPlan(weight_bits=3, group_size=4)) < error(LayerPlan(weight_bits=3))
    assert error(LayerPlan(weight_bits=3), bias_correction=True) < 0.7 * error(LayerPlan(weight_bits=3))
    assert error(LayerPlan(weight_bits=8)) < 0.01 * error(LayerPlan(weight_bits=3))


def test_convolutions_and_what_does_not_divide() -> None:
    net, x = CifarResNet(depth=8, width=4, in_channels=1).eval(), torch.rand(4, 1, 8, 8)
    done = quantize_weights(net, [x], LayerPlan(weight_bits=4, group_size=12), bias_correction=True)
    assert len(done.layers) == 1 + 3 * 2 + 2 + 1  # residual sums have no weights
    assert integer_weight(net.blocks[0].conv1)[1].shape == (4, 3)  # 4 channels of 3x3 pixels are 3 groups of 12
    assert integer_weight(net.conv)[1].shape == (4,)  # 9 are not
    assert len(done.corrected["batchnorm"]) == 9


def test_embeddings_too() -> None:
    net = GPT(vocab_size=16, max_length=8, width=8, depth=1, heads=2).eval()
    tokens = torch.randint(16, (4, 8))
    was = net(tokens).detach()
    done = quantize_weights(net, [tokens], bias_correction=True)
    assert any(isinstance(net.get_submodule(name), nn.Embedding) for name in done.layers)
    assert (net(tokens) - was).abs().max() < 0.05 * was.abs().max()


def test_refusals() -> None:
    net, batches = small()
    plan = LayerPlan(activation_bits=None)
    with pytest.raises(
        UserError, match=r"^compression\.weight_only: the pattern 'heed' matches no layer .* did you mean head\?$"
    ):
        quantize_weights(net, batches, plan, overrides_of(plan, {}, ["heed"]), key="compression.weight_only")
    with pytest.raises(UserError, match=r"^No layer of MLP would be quantized"):
        quantize_weights(net, batches, plan, {"*": None})
    with pytest.raises(UserError, match=r"no batch"):
        quantize_weights(net, [], plan)
    quantize_weights(net, batches, plan)
    with pytest.raises(UserError, match=r"^the net is quantized already"):
        quantize_weights(net, batches, plan)
