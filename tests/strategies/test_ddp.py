"""Communication hooks on the CPU: gradients are rounded or of low rank, and unknown hooks are refused."""

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import Callback
from support.quiet import quiet_trainer
from support.ranks import on_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lathe.strategies import DDP
from lathe.trainer import Trainer


def by_hand() -> Tensor:
    """The mean of both ranks' gradients of the first layer's weight, for each step; the learning rate is zero."""
    steps = []
    for halves in zip(batches(0), batches(1), strict=True):
        task = Regression()
        x, y = (torch.cat(parts) for parts in zip(*halves, strict=True))
        task.training_step((x, y), 0).backward()
        steps.append(task.net[0].weight.grad)
    return torch.stack(steps)


pytestmark = pytest.mark.law2

STEPS = 4
HOOKS: dict[str, dict[str, Any]] = {
    "plain": {},
    "fp16": {"comm_hook": "fp16"},
    "bf16": {"comm_hook": "bf16"},
    "powersgd": {"comm_hook": "powersgd", "powersgd_rank": 1, "powersgd_start_step": 2},
    "settings": {
        "find_unused_parameters": True,
        "gradient_as_bucket_view": False,
        "broadcast_buffers": False,
        "bucket_cap_mb": 7,
    },
    "static": {"static_graph": True},
}


class Regression(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.net.parameters(), lr=0.0)


class Gradients(Callback):
    """Records the gradient of the first layer's weight before each step."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        self.seen.append(pl_module.net[0].weight.grad.clone())


def batches(rank: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(rank)
    return [(torch.randn(8, 16, generator=generator), torch.randn(8, 16, generator=generator)) for _ in range(STEPS)]


def fit_with_each_hook(rank: int) -> dict[str, Any]:
    results = {}
    for name, settings in HOOKS.items():
        gradients = Gradients()
        trainer = quiet_trainer(gradients, devices=2, strategy=DDP(**settings), max_epochs=1)
        trainer.fit(Regression(), DataLoader(batches(rank), batch_size=None))
        results[name] = torch.stack(gradients.seen)
    return results


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return on_ranks(fit_with_each_hook)


@pytest.mark.parametrize("name", HOOKS)
def test_both_ranks_step_with_the_same_gradients(ranks: list[dict[str, Any]], name: str) -> None:
    assert ranks[0][name].shape == (STEPS, 16, 16)
    assert torch.equal(ranks[0][name], ranks[1][name])


@pytest.mark.parametrize(("name", "dtype"), [("fp16", torch.float16), ("bf16", torch.bfloat16)])
def test_compressed_gradients_are_rounded_to_their_format(
    ranks: list[dict[str, Any]], name: str, dtype: torch.dtype
) -> None:
    plain, compressed = ranks[0]["plain"], ranks[0][name]
    assert compressed.dtype == torch.float32
    assert torch.equal(compressed, compressed.to(dtype).float())
    assert not torch.equal(plain, plain.to(dtype).float())
    error = ((compressed - plain).norm() / plain.norm()).item()
    assert 0 < error < torch.finfo(dtype).eps


def test_powersgd_sends_low_rank_after_its_plain_steps(ranks: list[dict[str, Any]]) -> None:
    plain, compressed = ranks[0]["plain"], ranks[0]["powersgd"]
    torch.testing.assert_close(compressed[:2], plain[:2], rtol=1e-6, atol=1e-8)
    tolerance = 1e-4 * float(plain.norm())
    assert torch.linalg.matrix_rank(plain, atol=tolerance).min() > 10
    assert torch.linalg.matrix_rank(compressed[2:], atol=tolerance).tolist() == [1, 1]


@pytest.mark.parametrize("name", ["plain", "settings", "static"])
def test_without_a_hook_gradients_are_the_mean(ranks: list[dict[str, Any]], name: str) -> None:
    torch.testing.assert_close(ranks[0][name], by_hand(), rtol=1e-6, atol=1e-8)
