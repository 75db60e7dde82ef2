"""Compression methods and the moving average on the device: the losses, masks and bits of a CPU."""

import statistics
import time
from typing import Any

import pytest
import torch
from support.gpu import CONVOLUTIONS, PLAIN, Acceptance, close
from support.runs import column, weights
from torch import nn

from lathe.compression.quantization.net import quantized_layers

NOW = ("start=0", "end=0.5", "every_n_steps=1")


def method(name: str, *options: str) -> tuple[str, ...]:
    return (f"compression={name}", *(f"compression.{name}.{option}" for option in options))


METHODS = {
    "ema": ("callbacks=[default,ema]", "callbacks.ema.decay=0.5"),
    "prune": method("prune", *NOW),
    "rigl": ("compression=rigl",),
    "prune_nm": method("prune_nm", *NOW),
    "prune_structured": ("compression=prune_structured",),
    "prune_channels": method("prune_channels", "min_channels=1"),
    "distill": method("distill", "teacher=ema"),
    "ptq_static": ("compression=ptq_static",),
    "weight_only": ("compression=weight_only",),
}


@pytest.mark.stand_in("ema", "prune_channels", "ptq_static")
@pytest.mark.parametrize("name", METHODS)
def test_method(gpu: Acceptance, name: str) -> None:
    """Compare the losses, and a test of the run's final weights."""
    here, there = gpu.train(*CONVOLUTIONS, *METHODS[name]), gpu.train(*CONVOLUTIONS, *METHODS[name], accelerator="cpu")
    close(column(here.dir, "train/loss"), column(there.dir, "train/loss"), 2e-3)
    assert here.result["test/loss"] == pytest.approx(there.result["test/loss"], rel=2e-2)
    assert here.result["parameters"] == there.result["parameters"]
    ours, theirs = weights(here.dir, "best"), weights(there.dir, "best")
    assert {name: tensor.shape for name, tensor in ours.items()} == {name: t.shape for name, t in theirs.items()}
    for key, tensor in ours.items():  # the same weights are zero, except for ties that rounding decides
        if tensor.ndim > 1:
            assert float(((tensor == 0) != (theirs[key] == 0)).float().mean()) < 0.02


def test_qat(gpu: Acceptance) -> None:
    """An activation on a border between two integers rounds either way: losses are near, layers equal."""
    here, there = gpu.train(*CONVOLUTIONS, "compression=qat"), gpu.reference(*CONVOLUTIONS, "compression=qat")
    close(column(here.dir, "train/loss"), there, 5e-2)
    assert len(quantized_layers(here.net)) >= 7


def test_a_stack(gpu: Acceptance) -> None:
    words = ("compression=[distill,prune,qat]", "compression.distill.teacher=ema")
    here = gpu.train(*CONVOLUTIONS, *words, *method("prune", *NOW)[1:])
    close(column(here.dir, "train/loss"), gpu.reference(*CONVOLUTIONS, *words, *method("prune", *NOW)[1:]), 5e-2)
    kernels = [tensor for tensor in weights(here.dir).values() if tensor.ndim == 4]
    zeros = sum(int((kernel == 0).sum()) for kernel in kernels) / sum(kernel.numel() for kernel in kernels)
    assert zeros > 0.5
    assert len(quantized_layers(here.net)) >= 7


@pytest.mark.stand_in(why="torch has 2:4 kernels for GPUs alone")
def test_two_of_four_are_what_the_kernels_take(gpu: Acceptance, record_property: Any) -> None:
    """Linear layers pruned by prune_nm, in float16 through torch's 2:4 kernels; the speed is recorded."""
    run = gpu.train(*PLAIN, "model.net.width=512", *method("prune_nm", *NOW))
    layers = [m for m in run.net.modules() if isinstance(m, nn.Linear) and min(m.weight.shape) >= 512]
    assert layers
    for layer in layers:
        groups = layer.weight.detach().reshape(-1, 4)
        assert int((groups != 0).sum(1).max()) == 2
    layer = layers[0].half().to(gpu.device).requires_grad_(False)
    x = torch.randn(4096, layer.in_features, device=gpu.device, dtype=torch.float16)
    dense, before = layer(x), _milliseconds(layer, x)
    layer.weight = nn.Parameter(torch.sparse.to_sparse_semi_structured(layer.weight), requires_grad=False)
    torch.testing.assert_close(layer(x), dense, rtol=1e-2, atol=1e-2)
    record_property("2:4 over dense, 4096 x 512 x 512 in float16", round(_milliseconds(layer, x) / before, 3))


def _milliseconds(layer: nn.Module, x: torch.Tensor) -> float:
    taken = []
    for _ in range(30):
        torch.cuda.synchronize()
        began = time.perf_counter()
        layer(x)
        torch.cuda.synchronize()
        taken.append(1e3 * (time.perf_counter() - began))
    return statistics.median(taken[10:])
