"""A change of class keeps the layer, and taking it back leaves no trace."""

import torch
from torch import nn

from lathe.compression.quantization.fake_quant import FakeQuantize
from lathe.compression.quantization.layers import (
    QuantAdd,
    QuantConv2d,
    QuantEmbedding,
    QuantLinear,
    quantized_class,
    roles_of,
    to_plain,
    to_quantized,
)
from lathe.nets.blocks import Add


def test_there_and_back() -> None:
    for plain, kind in (
        (nn.Conv2d(2, 3, 3), QuantConv2d),
        (nn.Linear(2, 3), QuantLinear),
        (nn.Embedding(5, 2), QuantEmbedding),
        (Add(), QuantAdd),
    ):
        parameters, own = dict(plain.named_parameters()), type(plain)
        roles = roles_of(plain)
        to_quantized(plain)
        assert type(plain) is kind
        assert roles_of(plain) == roles
        assert all(getattr(plain, role) is None for role in roles)
        assert all(parameter is parameters[name] for name, parameter in plain.named_parameters())
        to_plain(plain)
        assert type(plain) is own
        assert not list(plain.children())


def test_layers_without_quantizers_compute_what_they_did() -> None:
    x = torch.randn(2, 2, 5, 5)
    layer = nn.Conv2d(2, 3, 3, stride=2, padding=1, padding_mode="reflect")
    before = layer(x)
    to_quantized(layer)
    assert torch.equal(layer(x), before)


def test_a_sum_rounds_both_sides() -> None:
    add = Add()
    to_quantized(add)
    assert isinstance(add, QuantAdd)
    for role, high in (("input_quantizer", 255.0), ("other_quantizer", 510.0)):
        q = FakeQuantize(8, symmetric=False)
        q.set_range(torch.zeros(1), torch.tensor([high]))
        q.switch(enabled=True)
        setattr(add, role, q)
    assert add(torch.tensor([3.2, 300.0]), torch.tensor([4.9, -1.0])).tolist() == [3 + 4, 255]


def test_a_padded_row_of_an_embedding_stays_zero() -> None:
    layer = nn.Embedding(4, 3, padding_idx=1)
    to_quantized(layer)
    assert isinstance(layer, QuantEmbedding)
    layer.weight_quantizer = FakeQuantize(8, symmetric=True, axis=0, channels=4, follows=True)
    layer.weight_quantizer.switch(enabled=True)
    out = layer(torch.tensor([1, 2]))
    assert out[0].tolist() == [0, 0, 0]
    out.sum().backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.tolist() == [[0] * 3, [0] * 3, [1] * 3, [0] * 3]


def test_what_nothing_quantizes() -> None:
    class Own(nn.Linear):
        pass

    assert quantized_class(Own(2, 2)) is None
    assert quantized_class(nn.ReLU()) is None
    assert quantized_class(nn.BatchNorm2d(3)) is None
