"""A task with two metrics on batches of several sizes, and the expected metrics."""

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.loggers import Logger
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lathe.tasks import Task
from lathe.trainer import Trainer

SIZES = (4, 1, 3, 4, 2, 4)  # samples of each batch


class Regression(Task):
    metrics = ("loss", "positive")  # `positive` is the share of outputs above the target

    def losses(self, outputs: Tensor, batch: Any) -> dict[str, Tensor]:
        return {"mse": (outputs - batch[1]).square().mean()}

    def reduce(self, outputs: Tensor, batch: Any, loss: Tensor) -> Tensor:
        count = torch.tensor(float(len(outputs)))
        return torch.stack((loss * count, (outputs > batch[1]).sum().float(), count)).detach()

    def val_dataloader(self) -> Any:
        return loader(batches(seed=1))


class Memory(Logger):
    name, version = "memory", "0"

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int | None, dict[str, float]]] = []
        self.saves: list[int] = []

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None: ...

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.append((step, metrics))

    def save(self) -> None:
        self.saves.append(len(self.rows))


def batches(sizes: tuple[int, ...] = SIZES, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(n, 3, generator=generator), torch.randn(n, 1, generator=generator)) for n in sizes]


def loader(data: list[Any]) -> Any:
    return DataLoader(data, batch_size=None)  # type: ignore[arg-type]


def task(lr: float = 0.0, **options: Any) -> Regression:
    torch.manual_seed(0)
    return Regression(nn.Linear(3, 1), optimizer=lambda net: torch.optim.SGD(net.parameters(), lr=lr), **options)


def trainer(*callbacks: Callback, kind: Any = Trainer, **options: Any) -> tuple[Trainer, Memory]:
    memory = Memory()
    defaults: dict[str, Any] = {
        "max_epochs": 1,
        "log_every_n_steps": 2,
        "num_sanity_val_steps": 0,
        "accelerator": "cpu",
        "devices": 1,
    }
    quiet = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    return kind(logger=memory, callbacks=list(callbacks), **{**defaults, **quiet, **options}), memory


def metrics(net: nn.Module, data: list[tuple[Tensor, Tensor]]) -> tuple[float, float]:
    """Return the mean squared error and the share of positive errors over all samples of `data`."""
    x, y = (torch.cat(parts) for parts in zip(*data, strict=True))
    with torch.no_grad():
        error = net(x) - y
    return error.square().mean().item(), (error > 0).float().mean().item()


def close(metrics: dict[str, float], split: str, expected: tuple[float, float], suffix: str = "") -> None:
    assert metrics[f"{split}/loss{suffix}"] == pytest.approx(expected[0], rel=1e-6)
    assert metrics[f"{split}/positive{suffix}"] == pytest.approx(expected[1], rel=1e-6)
