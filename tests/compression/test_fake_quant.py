"""Values are those of the integers, gradients match the papers, and ranges follow the observed values."""

import copy
import math
from typing import Any

import pytest
import torch
from support.quantization import seeded
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from lathe.compression.quantization.fake_quant import FakeQuantize, Histogram, calibrate, update_quantizers
from lathe.compression.quantization.net import (
    quantize,
    quantizers,
    update_ranges,
)


def activation(low: float, high: float, bits: int = 8, **options: bool) -> FakeQuantize:
    q = FakeQuantize(bits, symmetric=False, **options)
    q.set_range(torch.tensor([low]), torch.tensor([high]))
    q.switch(enabled=True, observing=False)
    return q


def weight(channels: int, bits: int = 8, **options: bool) -> FakeQuantize:
    q = FakeQuantize(bits, symmetric=True, axis=0, channels=channels, follows=True, **options)
    q.switch(enabled=True)
    return q


def test_activations_are_torchs_own_fake_quantization() -> None:
    x = torch.linspace(-2, 3, 1001, requires_grad=True)
    q = activation(-1.0, 2.0)
    assert q.scale.item() == pytest.approx(3 / 255)
    assert q.zero_point.item() == 85
    out = q(x)
    out.backward(torch.arange(1001.0))
    grad, x.grad = x.grad, None
    expected = torch.fake_quantize_per_tensor_affine(x, q.scale, q.zero_point, 0, 255)
    expected.backward(torch.arange(1001.0))
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-6)
    assert torch.equal(grad, x.grad)
    assert (grad == 0).sum() > 300  # outside the range
    assert q(torch.zeros(3)).tolist() == [0, 0, 0]


@pytest.mark.parametrize("bits", [2, 8])
def test_weights_are_torchs_own_fake_quantization_and_zero_stays_zero(bits: int) -> None:
    w = torch.randn(4, 3, 2, 2)
    w[1] = 0.0
    w[2, 0] = 0.0
    w.requires_grad_()
    q = weight(4, bits)
    high = 2 ** (bits - 1) - 1
    scale = w.detach().flatten(1).abs().amax(1) / high
    scale[1] = 1 / high
    out = q(w)
    expected = torch.fake_quantize_per_channel_affine(w, scale, torch.zeros(4, dtype=torch.int32), 0, -high, high)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-6)
    assert (out[w == 0] == 0).all()
    out.sum().backward()
    assert (w.grad == 1).all()
    integers = q.integers(w)
    assert integers.abs().amax() == high
    assert torch.equal(integers * scale.view(4, 1, 1, 1), out)


# -- learned step size


def test_lsq_gradients_are_those_of_the_paper() -> None:
    q = FakeQuantize(3, symmetric=True, lsq=True)  # integers -3 to 3
    q.switch(enabled=True)
    q.set_range(torch.tensor([-1.5]), torch.tensor([0.3]))
    assert q.scale.item() == 0.5
    x = torch.tensor([0.6, -0.2, 5.0, -5.0], requires_grad=True)
    (q(x) * torch.tensor([1.0, 2.0, 3.0, 4.0])).sum().backward()
    assert x.grad.tolist() == [1, 2, 0, 0]
    by_hand = 1 * (1 - 1.2) + 2 * (0 + 0.4) + 3 * 3 + 4 * -3
    assert q.growth.grad.item() == pytest.approx(by_hand * (4 * 3) ** -0.5 / 0.5, abs=1e-5)
    with torch.no_grad():
        q.growth.fill_(-0.1)
    assert q.scale.item() == 0.5
    update_quantizers([q])
    assert q.scale.item() == pytest.approx(0.5 * math.exp(-0.1))


# -- ranges


def test_ranges_are_made_of_a_whole_step() -> None:
    q = FakeQuantize(8, symmetric=False)
    for extreme in (1.0, 3.0):  # two accumulated batches, the second computed twice
        q(torch.tensor([-extreme, 0.0]))
        q(torch.tensor([-extreme, 0.0]))
    update_quantizers([q])
    assert (q.minimum.item(), q.maximum.item(), int(q.updates)) == (-3, 0, 1)
    q(torch.tensor([-1.0, 2.0]))
    update_quantizers([q])
    assert (q.minimum.item(), q.maximum.item()) == (-2, 1)  # the mean of two
    assert q.scale.item() == pytest.approx(3 / 255)
    before = copy.deepcopy(q.state_dict())
    update_quantizers([q])  # nothing was seen
    q(torch.tensor([torch.inf]))
    update_quantizers([q])
    q.eval()
    q(torch.tensor([100.0]))
    update_quantizers([q])
    q.train()
    q.switch(observing=False)
    q(torch.tensor([100.0]))
    update_quantizers([q])
    before["observing"] = torch.tensor(0, dtype=torch.uint8)
    assert all(torch.equal(value, before[name]) for name, value in q.state_dict().items())


def test_observers_differ_in_what_they_remember() -> None:
    spans = {}
    for observer in ("minmax", "moving_average", "percentile"):
        q = FakeQuantize(8, symmetric=False)
        q.observer, q.percentile = observer, 99.0
        for scale in (4.0, 1.0):
            q(scale * torch.linspace(-1, 1, 1001))
            update_quantizers([q])
        spans[observer] = q.maximum.item()
    assert spans == {"minmax": 4.0, "moving_average": 2.5, "percentile": pytest.approx(0.98 * 2.5, abs=1e-3)}


# -- one tensor, the input of several layers


def test_a_shared_input_is_rounded_once() -> None:
    q = activation(-1.0, 1.0)
    q.shared = True
    x = torch.randn(4, requires_grad=True) * 1.0
    first = q(x)
    assert q(x) is first
    with torch.no_grad():
        assert q(x) is not first
        x.mul_(0.5)
    assert torch.equal(q(x), activation(-1.0, 1.0)(x))  # changed in place


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's compiler does so
def test_compiled_layers_have_one_graph_and_the_same_values() -> None:
    q = FakeQuantize(8, symmetric=False)
    q.shared = True
    compiled = copy.deepcopy(q)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    graph = torch.compile(compiled, backend=counter, fullgraph=True)
    for step in range(6):
        x = (torch.randn(6, 3) * (step + 1)).requires_grad_()
        for each, call in ((q, q), (compiled, graph)):
            call(x).square().sum().backward()
            update_quantizers([each])
            if step == 2:
                each.switch(enabled=True)
    assert counter.frame_count == 2  # before and after rounding began
    assert all(torch.equal(value, compiled.state_dict()[name]) for name, value in q.state_dict().items())


def test_low_precision_is_computed_in_float32() -> None:
    x = torch.linspace(-1, 2, 77).bfloat16().requires_grad_()
    q = activation(-1.0, 2.0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = q(x)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, q(x.detach().float()).bfloat16())
    out.sum().backward()
    assert x.grad.dtype == torch.bfloat16
    assert (x.grad == 1).all()


__all__ = ["seeded"]  # a fixture


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


def test_a_percentile_is_exact_and_entropy_cuts_a_lonely_outlier_only() -> None:
    even = Histogram(0.0, 1.0)
    even.add(torch.linspace(0, 1, 100001))
    assert even.range("percentile", 99.0, 8) == pytest.approx((0.0, 0.99), abs=2e-3)
    assert even.range("entropy", 0.0, 8)[1] > 0.97
    torch.manual_seed(0)
    values = torch.randn(100000).abs()
    values[0] = 40.0
    lonely = Histogram(0.0, 40.0)
    lonely.add(values)
    assert 3 < lonely.range("entropy", 0.0, 8)[1] < 10
