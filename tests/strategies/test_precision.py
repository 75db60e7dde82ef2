"""Each format computes in its dtype, also on the CPU; formats that a device lacks are refused."""

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from support.quiet import quiet_trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lathe.strategies import precision_plugin
from lathe.trainer import Trainer
from lathe.training.trainer_setup import device_type


class Notes(LightningModule):
    """Records the dtypes of a linear layer's weight, input and output in a training step, and autocast's."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net, self.scale = nn.Linear(4, 2), scale

    def training_step(self, batch: tuple[Tensor], batch_idx: int) -> Tensor:
        y = self.net(batch[0])
        autocast = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
        self.dtypes = (self.net.weight.dtype, batch[0].dtype, y.dtype, autocast)
        return y.float().sum() * self.scale

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.net.parameters(), lr=0.01)


def fit(name: str, scale: float = 1.0, **settings: Any) -> tuple[Notes, Trainer]:
    task = Notes(scale)
    trainer = quiet_trainer(max_steps=1, **precision_plugin(name, "cpu", **settings))
    trainer.fit(task, DataLoader([(torch.ones(3, 4),)], batch_size=None))
    return task, trainer


f16, bf16, f32, f64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


@pytest.mark.parametrize(
    ("name", "dtypes"),
    [
        ("64-true", (f64, f64, f64, None)),
        ("32-true", (f32, f32, f32, None)),
        ("16-mixed", (f32, f32, f16, f16)),
        ("bf16-mixed", (f32, f32, bf16, bf16)),
        ("16-true", (f16, f16, f16, None)),
        ("bf16-true", (bf16, bf16, bf16, None)),
    ],
)
def test_formats_on_the_cpu(name: str, dtypes: tuple[Any, ...]) -> None:
    assert fit(name)[0].dtypes == dtypes


def test_16_mixed_scales_gradients_and_skips_a_step_that_overflows() -> None:
    plain = Notes().net.weight.detach().clone()
    task, trainer = fit("16-mixed", init_scale=1024.0)
    scaler = trainer.precision_plugin.scaler
    assert isinstance(scaler, torch.amp.GradScaler)
    assert scaler.is_enabled()
    assert scaler.get_scale() == 1024.0
    torch.testing.assert_close(task.net.weight.detach(), plain - 0.01 * 3)  # three samples of ones, unscaled

    task, trainer = fit("16-mixed", scale=1e4, init_scale=1024.0)  # 1e4 * 1024 is beyond float16
    assert trainer.precision_plugin.scaler.get_scale() == 512.0
    assert torch.equal(task.net.weight.detach(), plain)


def test_matmul_sets_float32_products_and_convolutions() -> None:
    """By default cuDNN convolves in TF32 on Ampere and later; both kinds of switches can be read and agree."""
    backends: Any = torch.backends
    torch.backends.cudnn.allow_tf32 = True  # torch's default
    for matmul in ("highest", "high", "medium", "highest"):
        precision_plugin("bf16-mixed", "cpu", matmul=matmul)
        assert torch.get_float32_matmul_precision() == matmul
        tf32 = matmul != "highest"
        assert (backends.cuda.matmul.allow_tf32, backends.cudnn.allow_tf32) == (tf32, tf32)
        newer = {part.fp32_precision for part in (backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn)}
        assert newer == {"tf32"} if tf32 else "tf32" not in newer
    with torch.backends.cudnn.flags(enabled=False):  # torch's code reads the older switches here
        pass


@pytest.mark.parametrize(
    ("accelerator", "cuda", "mps", "device"),
    [
        ("auto", False, False, "cpu"),
        ("gpu", True, True, "cuda"),
        ("gpu", False, True, "mps"),
        ("cpu", True, True, "cpu"),
    ],
)
def test_device_type(monkeypatch: pytest.MonkeyPatch, accelerator: str, cuda: bool, mps: bool, device: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
    assert device_type(accelerator) == device


@pytest.mark.parametrize(("tiles", "name"), [(True, "bf16-mixed"), (False, "32-true")])
def test_auto_takes_bfloat16_where_a_cpu_has_units_for_it_and_says_so(
    tiles: bool, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: tiles)
    assert precision_plugin("auto", "cpu") == {"precision": name}
    assert f"precision=auto took {name}: the CPU has" in capsys.readouterr().out
