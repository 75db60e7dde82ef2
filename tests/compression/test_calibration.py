"""Ranges are those of the data seen during observation, and do not change once they are fixed."""

import copy
from typing import Any

import pytest
import torch
from support.quantization import X, resnet, seeded
from torch import nn

from lathe.compression.quantization.calibration import Histogram
from lathe.compression.quantization.layers import QuantAdd
from lathe.compression.quantization.net import (
    LayerPlan,
    calibrate,
    freeze_observers,
    quantize,
    quantized_layers,
    quantizers,
    set_enabled,
    update_ranges,
)

__all__ = ["seeded"]  # a fixture


def test_frozen_ranges_do_not_move() -> None:
    net: Any = nn.Sequential(nn.Linear(4, 4))
    quantize(net, torch.ones(2, 4))
    freeze_observers(net)
    set_enabled(net, True)
    scales = [q.qparams(net[0].weight)[0].clone() for q in quantizers(net)]
    with torch.no_grad():
        net[0].weight.mul_(3)
    net(torch.full((2, 4), 9.0))
    update_ranges(net)
    assert all(
        torch.equal(q.qparams(net[0].weight)[0], scale) for q, scale in zip(quantizers(net), scales, strict=True)
    )


def test_dynamic_activations_need_no_data() -> None:
    net: Any = resnet()
    quantize(net, X, LayerPlan(activation="dynamic"))
    set_enabled(net, True)
    assert not any(isinstance(layer, QuantAdd) for layer in quantized_layers(net).values())
    before = copy.deepcopy(net.state_dict())
    assert all(
        torch.equal(net.conv.input_quantizer(factor * X), net.conv.input_quantizer(X) * factor) for factor in (2, 64)
    )
    net.train()(X)
    update_ranges(net)
    net.eval()
    before |= {name: value for name, value in net.state_dict().items() if "bn" in name}
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


@pytest.mark.parametrize("method", ["minmax", "percentile", "entropy"])
def test_calibration_fixes_ranges_of_the_float_net(method: str) -> None:
    net: Any = nn.Sequential(nn.Linear(1, 1, bias=False), nn.ReLU(), nn.Linear(1, 1, bias=False))
    nn.init.ones_(net[0].weight)
    quantize(net, torch.zeros(1, 1))
    values = torch.randn(20000, 1)
    values[0], values[1] = 50.0, -50.0
    calibrate(net.train(), [values, (values, None)], method, percentile=99.9)
    assert net.training
    ranges = [(float(q.minimum), float(q.maximum)) for q in quantizers(net) if not q.symmetric]
    assert all(q.is_enabled for q in quantizers(net))
    if method == "minmax":
        assert ranges == [(-50, 50), (0, 50)]
    else:
        for low, high in ranges:
            assert low == 0 or -7 < low < -2
            assert 2 < high < 7
    state = copy.deepcopy(net.state_dict())
    net(values)
    update_ranges(net)
    assert all(torch.equal(value, state[name]) for name, value in net.state_dict().items())


def test_percentiles_of_one_and_two_sides() -> None:
    values = torch.linspace(-1, 1, 100001)
    both = Histogram(-1.0, 1.0)
    both.add(values)
    assert both.range("percentile", 99.0, 8) == pytest.approx((-0.99, 0.99), abs=2e-3)
    one = Histogram(0.0, 1.0)
    one.add(values.abs())
    assert one.range("percentile", 99.0, 8) == pytest.approx((0.0, 0.99), abs=2e-3)
    assert one.range("minmax", 99.0, 8) == (0.0, 1.0)


def test_entropy_keeps_what_is_evenly_spread_and_cuts_a_lonely_outlier() -> None:
    even = Histogram(0.0, 1.0)
    even.add(torch.linspace(0, 1, 100001))
    assert even.range("entropy", 0.0, 8)[1] > 0.97
    torch.manual_seed(0)
    values = torch.randn(100000).abs()
    values[0] = 40.0
    lonely = Histogram(0.0, 40.0)
    lonely.add(values)
    assert 3 < lonely.range("entropy", 0.0, 8)[1] < 10
