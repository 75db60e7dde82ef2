"""Each ZeRO stage: its memory, its rounding and its refusals."""

import importlib.util
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from support.quiet import quiet_trainer
from support.ranks import on_ranks
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.utils.data import DataLoader

from lathe.errors import UserError
from lathe.strategies.deepspeed import strategy as room
from lathe.strategies.deepspeed.strategy import DeepSpeed
from lathe.trainer import Trainer

if importlib.util.find_spec("deepspeed") is None:
    pytest.skip("DeepSpeed is not installed", allow_module_level=True)


class Regression(LightningModule):
    def __init__(self, optimizer: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(64, 65), nn.Tanh(), nn.Linear(65, 64))
        self.optimizer = optimizer
        self.seen: list[float] = []

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = nn.functional.mse_loss(self.net(batch[0]).float(), batch[1].float())
        self.seen.append(loss.item())
        return loss

    def configure_optimizers(self) -> Optimizer:
        if self.optimizer == "adamw":
            return AdamW(self.parameters(), lr=0.01)
        return SGD(self.parameters(), lr=0.1, momentum=0.9)


def batches(rank: int, count: int = 5, size: int = 8) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(rank)
    shape = (count, size, 64)
    x, y = torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)
    return list(zip(x, y, strict=True))


def fit(
    strategy: Any, optimizer: str, rank: int, devices: int = 2, size: int = 8, **arguments: Any
) -> tuple[Trainer, Regression]:
    trainer = quiet_trainer(devices=devices, strategy=strategy, **{"max_epochs": 1, **arguments})
    task = Regression(optimizer)
    trainer.fit(task, DataLoader(batches(rank, size=size), batch_size=None))
    return trainer, task


def held(trainer: Trainer, task: LightningModule) -> int:
    """Return the bytes of parameters and optimizer state in this process, counting each storage once."""
    zero = trainer.optimizers[0]
    tensors = [p.data for p in task.parameters()]
    tensors += [p.ds_tensor for p in task.parameters() if hasattr(p, "ds_tensor")]
    base = getattr(zero, "optimizer", zero)
    tensors += list(getattr(zero, "fp32_partitioned_groups_flat", getattr(zero, "single_partition_of_fp32_groups", [])))
    tensors += [value for state in base.state.values() for value in state.values() if isinstance(value, Tensor)]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def smaller_things(rank: int) -> dict[str, Any]:
    """Checks that need two ranks and no run directory."""
    found: dict[str, Any] = {}
    found["bytes"] = {"ddp": held(*fit("ddp", "adamw", rank))}
    found["bytes"] |= {
        stage: held(*fit(DeepSpeed(stage=stage, persistence_threshold=0), "adamw", rank)) for stage in (1, 2, 3)
    }
    found["bf16-mixed"] = [
        fit(strategy, "sgd", rank, precision="bf16-mixed")[1].seen
        for strategy in ("ddp", DeepSpeed(stage=1), DeepSpeed(stage=2), DeepSpeed(stage=3, persistence_threshold=0))
    ]
    found["bf16-true"] = [
        fit(strategy, "adamw", rank, precision=precision)[1].seen
        for precision, strategy in (
            ("32-true", "ddp"),
            *(("bf16-true", DeepSpeed(stage=s, persistence_threshold=0)) for s in (1, 2, 3)),
        )
    ]
    found["window"] = [
        fit(strategy, "sgd", rank, accumulate_grad_batches=3, max_epochs=3)[1].seen
        for strategy in ("ddp", DeepSpeed(stage=2))
    ]
    found["uneven"] = [
        fit(strategy, "sgd", rank, size=8 - 6 * rank, max_epochs=3)[1].seen for strategy in ("ddp", DeepSpeed(stage=2))
    ]
    return found


@pytest.fixture(scope="module")
def small() -> dict[str, Any]:
    return on_ranks(smaller_things)[0]


def test_each_stage_holds_less(small: dict[str, Any]) -> None:
    dense, one, two_, three = (small["bytes"][key] for key in ("ddp", 1, 2, 3))
    assert three <= 0.60 * dense
    assert three < one == two_ < dense


def test_bf16_mixed_is_that_of_ddp(small: dict[str, Any]) -> None:
    ddp, *zero = small["bf16-mixed"]
    for seen in zero:
        assert seen == pytest.approx(ddp, rel=1e-6)


def test_bf16_true_follows_float32(small: dict[str, Any]) -> None:
    wide, *zero = small["bf16-true"]
    for seen in zero:
        assert seen != wide
        assert seen == pytest.approx(wide, rel=0.02)


def test_without_the_package_the_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        UserError, match=r"^strategy=deepspeed_3_offload needs DeepSpeed: pip install -e '\.\[deepspeed\]'$"
    ):
        DeepSpeed(stage=3, offload_optimizer=True)


def test_an_unfinished_window_ends_with_its_epoch(small: dict[str, Any]) -> None:
    """Five batches in windows of three: the last two are a step of their own, under DeepSpeed as well."""
    ddp, zero = small["window"]
    assert zero == pytest.approx(ddp, rel=1e-5)


def test_replicas_count_by_their_samples(small: dict[str, Any]) -> None:
    ddp, zero = small["uneven"]
    assert zero == pytest.approx(ddp, rel=1e-5)
