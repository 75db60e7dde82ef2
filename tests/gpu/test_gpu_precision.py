"""Every number format on the device compared with float32 on a CPU, and the switches of float32."""

import math
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from support.gpu import CONVOLUTIONS, PLAIN, Acceptance, close
from support.runs import weights

from lathe.strategies.precision import best_format, set_float32

SGD = ("optimizer=sgd", "optimizer.lr=0.05")  # AdamW's second moments vanish in float16
# Tolerance of the losses of four steps relative to float32's; a mixed format's checkpoint stays float32.
FORMATS = {
    "64-true": (1e-5, torch.float64),
    "32-true": (1e-4, torch.float32),
    "bf16-mixed": (2e-2, torch.float32),
    "16-mixed": (5e-3, torch.float32),
    "bf16-true": (5e-2, torch.bfloat16),
    "16-true": (2e-2, torch.float16),
}


@pytest.mark.stand_in("16-mixed-convolutions", "64-true-plain", "bf16-mixed-plain")
@pytest.mark.parametrize("net", ["plain", "convolutions"])
@pytest.mark.parametrize("name", FORMATS)
def test_format(gpu: Acceptance, name: str, net: str) -> None:
    words = (*(PLAIN if net == "plain" else CONVOLUTIONS), *SGD)
    tolerance, kept = FORMATS[name]
    run = gpu.train(*words, f"precision={name}")
    metrics = run.metrics
    rows = metrics.to_dict("records") if hasattr(metrics, "to_dict") else metrics
    losses = [row["train/loss"] for row in rows if not math.isnan(row.get("train/loss", math.nan))]
    close(losses, gpu.reference(*words), tolerance)
    held = weights(run.dir)
    assert {tensor.dtype for tensor in held.values() if tensor.is_floating_point()} == {kept}


class Scale(Callback):
    """Records the scaler's factor after each batch, and the number of optimizer steps."""

    def __init__(self) -> None:
        self.scales: list[float] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        scaler = trainer.precision_plugin.scaler  # type: ignore[attr-defined]  # of mixed float16
        self.scales.append(scaler.get_scale())


def test_an_overflow_halves_the_scale_and_skips_the_step(gpu: Acceptance) -> None:
    watch = Scale()
    words = (*PLAIN, "precision=16-mixed", f"precision.init_scale={2.0**26}", "trainer.max_steps=16")
    run = gpu.train(*words, watch=watch)
    assert watch.scales[0] == 2.0**25  # gradients times 2 ** 26 overflow float16
    assert watch.scales == sorted(watch.scales, reverse=True)
    assert watch.scales[-1] == watch.scales[-2] >= 2.0**8  # and then optimizer steps are taken
    assert all(bool(tensor.isfinite().all()) for tensor in weights(run.dir).values())


def test_what_auto_takes(gpu: Acceptance) -> None:
    name, reason = best_format(gpu.device.type)
    tolerance = FORMATS[name][0]
    close(gpu.curve(*PLAIN, *SGD, "precision=auto"), gpu.reference(*PLAIN, *SGD), tolerance)
    assert not gpu.real or torch.cuda.get_device_name() in reason
    assert name == "bf16-mixed" or not gpu.real or torch.cuda.get_device_capability() < (8, 0)


def test_performance_fast(gpu: Acceptance) -> None:
    words = (*CONVOLUTIONS, *SGD)
    close(gpu.curve(*words, "performance=fast"), gpu.reference(*words), 2e-2)


class Layout(Callback):
    def __init__(self) -> None:
        self.last: list[bool] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        kernels = [p for p in pl_module.parameters() if p.ndim == 4 and min(p.shape) > 1]
        self.last = [kernel.is_contiguous(memory_format=torch.channels_last) for kernel in kernels]


def test_channels_last(gpu: Acceptance) -> None:
    watch = Layout()
    words = (*CONVOLUTIONS, *SGD, "model.net.width=16")
    close(gpu.curve(*words, "trainer.channels_last=true", watch=watch), gpu.reference(*words), 1e-3)
    assert watch.last
    assert all(watch.last)


@pytest.mark.parametrize("matmul", ["highest", "high"])
def test_the_switch_of_float32_turns_products_and_convolutions(
    gpu: Acceptance, matmul: str, record_property: Any
) -> None:
    """TF32 has 10 bits of mantissa: errors are about 1e-3 of a sum's size, without it 1e-6."""
    set_float32(matmul)
    assert torch.backends.cudnn.allow_tf32 is (matmul == "high")
    assert torch.backends.cuda.matmul.allow_tf32 is (matmul == "high")
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(512, 512, generator=generator) for _ in range(2))
    images, kernels = torch.randn(8, 64, 16, 16, generator=generator), torch.randn(64, 64, 3, 3, generator=generator)
    pairs = {
        "product": (x.to(gpu.device) @ w.to(gpu.device), x.double() @ w.double()),
        "convolution": (
            torch.conv2d(images.to(gpu.device), kernels.to(gpu.device)),
            torch.conv2d(images.double(), kernels.double()),
        ),
    }
    has_it = gpu.real and torch.cuda.get_device_capability() >= (8, 0)
    for name, (found, exact) in pairs.items():
        error = float((found.double().cpu() - exact).abs().max() / exact.abs().max())
        record_property(f"{name}, {matmul}: largest error", error)
        if matmul == "high" and has_it:
            assert 1e-5 < error < 1e-2
        else:
            assert error < 1e-5
