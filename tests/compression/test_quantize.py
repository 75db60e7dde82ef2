"""Quantized nets: shared quantizers, integers, the description, and layers that stay in float."""

import copy
import json
from typing import Any

import pytest
import torch
from support.quantization import X, resnet, seeded
from torch import nn

from lathe.compression.quantization.net import (
    LayerPlan,
    QuantConv2d,
    describe,
    float_sentence,
    integer_weight,
    quantize,
    quantized_layers,
    rebuild,
    set_enabled,
    strip,
)
from lathe.compression.structure import apply_structure, structure_of
from lathe.errors import UserError
from lathe.nets import GPT, ViT
from lathe.nets.blocks import Add

__all__ = ["seeded"]  # a fixture


def gpt(tie_weights: bool = True) -> nn.Module:
    return GPT(vocab_size=11, max_length=6, width=8, depth=1, heads=2, tie_weights=tie_weights).eval()


def test_all_layers_and_sums_of_a_resnet_are_quantized() -> None:
    net = resnet()
    plain = copy.deepcopy(net)
    names = quantize(net, X)
    assert names == list(quantized_layers(net))
    assert len([name for name in names if name.endswith(".add")]) == 3
    assert {"conv", "head", "blocks.1.shortcut.conv"} <= set(names)
    assert [name for name, _ in net.named_parameters()] == [name for name, _ in plain.named_parameters()]
    assert torch.equal(net(X), plain(X))
    set_enabled(net, True)
    difference = (net(X) - plain(X)).abs().max()
    assert 0 < difference < 0.03 * plain(X).abs().max()
    loaded = copy.deepcopy(plain)  # a float net takes the checkpoint's weights by their plain names
    assert loaded.load_state_dict(net.state_dict(), strict=False).missing_keys == []


def test_every_tensor_has_one_scale() -> None:
    net: Any = resnet()
    quantize(net, X)
    block = net.blocks[1]
    assert block.conv1.input_quantizer is block.shortcut.conv.input_quantizer
    identity = net.blocks[0]
    assert identity.add.other_quantizer is identity.conv1.input_quantizer
    assert identity.conv1.input_quantizer is not identity.conv2.input_quantizer
    assert identity.conv1.input_quantizer is not block.conv1.input_quantizer
    vit: Any = ViT(channels=1, image_size=8, num_classes=3, patch_size=4, width=8, depth=1, heads=2)
    quantize(vit, X)
    attention = vit.blocks[0].attention
    assert attention.q.input_quantizer is attention.k.input_quantizer is attention.v.input_quantizer
    assert attention.out.input_quantizer is not attention.q.input_quantizer


def test_tied_weights_share_their_integers() -> None:
    net: Any = gpt()
    ids = torch.randint(0, 11, (2, 6))
    quantize(net, ids)
    set_enabled(net, True)
    assert net.head.weight_quantizer is net.embed.token.weight_quantizer
    assert torch.equal(integer_weight(net.head)[0], integer_weight(net.embed.token)[0])
    plain = strip(net)
    assert plain.head.weight is plain.embed.token.weight
    with pytest.raises(UserError, match=r"head and embed\.token share one weight"):
        quantize(gpt(), ids, overrides={"head": LayerPlan(4)})
    quantize(gpt(tie_weights=False), ids, overrides={"head": LayerPlan(4)})


def test_the_description_rebuilds_the_net() -> None:
    net = resnet()
    plain = copy.deepcopy(net)
    plans = {
        "blocks.0.*": LayerPlan(weight_bits=4, lsq=True),
        "head": None,
        "blocks.1.conv2": LayerPlan(4, group_size=12),
    }
    quantize(net, X, LayerPlan(per_channel=False), plans)
    set_enabled(net, True)
    description = describe(net)
    assert json.loads(json.dumps(description)) == description
    assert "head" not in description
    other = copy.deepcopy(plain)
    apply_structure(other, structure_of(net))
    other.load_state_dict(net.state_dict())
    assert describe(other) == description
    assert torch.equal(other(X), net(X))
    apply_structure(other, structure_of(net))  # applying it twice changes nothing
    assert describe(copy.deepcopy(other)) == description
    assert describe(plain) == {}
    with pytest.raises(UserError, match="is quantized"):
        rebuild(other, description)
    with pytest.raises(UserError, match=r"quantized layer blocks\.2\.conv1, which Sequential lacks"):
        rebuild(nn.Sequential(), {"blocks.2.conv1": description["blocks.2.conv1"]})


def test_integers_are_what_the_layer_computes_with() -> None:
    layer = nn.Linear(6, 3)
    with torch.no_grad():
        layer.weight[0, 2] = layer.weight[1] = 0.0
    net = nn.Sequential(layer)
    x = torch.randn(5, 6)
    quantize(net, x)
    set_enabled(net, True)
    integers, scale = integer_weight(layer)
    assert integers.dtype == torch.int8
    assert scale.shape == (3,)
    assert integers[0, 2] == 0
    assert (integers[1] == 0).all()
    q = layer.input_quantizer
    rounded = torch.clamp(torch.round(x / q.scale) + q.zero_point, 0, 255)
    exact = (rounded - q.zero_point) @ integers.float().T * (q.scale * scale) + layer.bias
    torch.testing.assert_close(net(x), exact)


def test_strip_leaves_plain_layers_with_the_integers_values() -> None:
    net = resnet()
    quantize(net, X, overrides={"*": LayerPlan(4, activation_bits=None)})
    set_enabled(net, True)
    plain: Any = strip(net)
    assert type(plain.conv) is nn.Conv2d
    assert type(net.conv) is QuantConv2d
    assert plain.state_dict().keys() == resnet().state_dict().keys()
    assert torch.equal(plain(X), net(X))
    assert len(plain.conv.weight[0].unique()) <= 15
    quantize(net := resnet(), X)
    assert type(strip(net).blocks[0].add) is Add


def test_a_method_that_leaves_many_weights_in_float_warns() -> None:
    layers = (nn.Conv1d(4, 4, 3, padding=1), nn.Linear(8, 4), nn.Flatten(), nn.Linear(16, 5))
    net = nn.Sequential(*layers)  # of 48, 32 and 80 weights; a one-dimensional convolution can't be quantized
    quantize(net, torch.randn(2, 4, 8), overrides={"3": None})
    assert float_sentence(net, "compression.qat", {"0": None, "3": None}) is None
    for overrides, left in (({}, "80.0% of the weights in float, such as 3"), ({"3": None}, "30.0% of")):
        assert f"compression.qat leaves {left}" in str(float_sentence(net, "compression.qat", overrides))
