"""Counts compared with arithmetic; the net is left unchanged."""

import pytest
import torch
from torch import nn

from lathe.measure import count_flops, count_macs
from lathe.measure.flops import peak_by_name
from lathe.nets import ViT


def test_the_net_is_left_as_found() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))
    net[1].eval()
    net(torch.randn(5, 3)).sum().backward()
    state = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    gradient, random = net[0].weight.grad.clone(), torch.get_rng_state()
    modes = [m.training for m in net.modules()]
    assert count_flops(net, torch.randn(5, 3, generator=torch.Generator())) == 2 * 5 * (12 + 8)
    assert [m.training for m in net.modules()] == modes
    assert torch.equal(net[0].weight.grad, gradient)
    assert torch.equal(torch.get_rng_state(), random)
    for name, tensor in net.state_dict().items():
        assert torch.equal(tensor, state[name])


def test_a_compiled_net_counts_as_eager() -> None:
    net = nn.Linear(7, 5)
    net.compile(backend="eager")
    assert count_flops(net, torch.randn(3, 7)) == 2 * 3 * 7 * 5


@pytest.mark.parametrize(
    ("name", "dtype", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", torch.bfloat16, 989.4e12),
        ("Tesla V100-SXM2-16GB", torch.bfloat16, None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", torch.float16, None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", torch.float16, None),
        ("NVIDIA H100 80GB HBM3", torch.float64, None),
    ],
)
def test_peak_by_name(name: str, dtype: torch.dtype, peak: float | None) -> None:
    assert peak_by_name(name, dtype) == peak


def test_float32_means_tf32_where_it_is_allowed() -> None:
    switches = (torch.backends.cuda.matmul, torch.backends.cudnn.conv)
    found = [switch.fp32_precision for switch in switches]
    try:
        for settings, peak in ((("ieee", "tf32"), 156e12), (("tf32", "ieee"), 156e12), (("ieee", "ieee"), 19.5e12)):
            for switch, setting in zip(switches, settings, strict=True):
                switch.fp32_precision = setting
            assert peak_by_name("NVIDIA A100-SXM4-40GB", torch.float32) == peak
    finally:
        for switch, setting in zip(switches, found, strict=True):
            switch.fp32_precision = setting


def test_attention_counts_on_a_cpu_as_on_any_device() -> None:
    """Two products of 16 x 16 x 64 for each of two samples and four blocks, which torch omits on CPUs."""
    net = ViT(channels=1, image_size=8, num_classes=10, patch_size=2, width=64, depth=4, heads=4)
    found = count_flops(net, torch.zeros(2, 1, 8, 8))
    assert found == count_flops(net.to("meta"), torch.zeros(2, 1, 8, 8, device="meta"))
    linear = 2 * 2 * 4 * 16 * (4 * 64 * 64 + 2 * 64 * 256) + 2 * 2 * 16 * 64 * 4 + 2 * 2 * 64 * 10
    assert found == linear + 2 * 4 * 2 * 2 * 16 * 16 * 64


def small() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 25, 3)
    )


def test_layers_by_arithmetic() -> None:
    found = count_macs(small(), torch.randn(6, 2, 5, 5))
    assert found.layers == {"0": 6 * 25 * 4 * 2 * 9, "4": 6 * 300}
    assert found.dense == found.effective == 6 * 1800 + 6 * 300
