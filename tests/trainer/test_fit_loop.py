"""Epochs of our Trainer: modules that override train(), loaders that run dry, and stops before min_epochs."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import EarlyStopping
from support.quiet import quiet_trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lathe.errors import UserError
from lathe.trainer import Trainer


class FrozenNorm(nn.Module):
    """Keeps its BatchNorm in evaluation mode, as torch's own recipe does."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(4), nn.Linear(4, 1)

    def train(self, mode: bool = True) -> "FrozenNorm":
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.norm(x))


class Module(LightningModule):
    def __init__(self, losses: Iterable[float] = ()) -> None:
        super().__init__()
        self.net, self.other, self.losses = FrozenNorm(), nn.Dropout(0.5).eval(), list(losses)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch).square().mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("loss", torch.tensor(float(self.losses[self.current_epoch]) if self.losses else 0.0))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Resetting:
    """Starts again only when it is read beyond its end."""

    def __init__(self, batches: list[Tensor]) -> None:
        self.batches, self.iterator = batches, iter(batches)

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> "Resetting":
        return self

    def __next__(self) -> Tensor:
        try:
            return next(self.iterator)
        except StopIteration:
            self.iterator = iter(self.batches)
            raise


def batches(number: int = 3) -> list[Tensor]:
    return list(torch.randn(number, 8, 4, generator=torch.Generator().manual_seed(0)))


def loader(number: int = 3) -> DataLoader[Any]:
    return DataLoader(torch.cat(batches(number)), batch_size=8)  # type: ignore[arg-type]


def fit(module: LightningModule, train: Any, *callbacks: Callback, epochs: int = 2, **options: Any) -> Trainer:
    trainer = quiet_trainer(*callbacks, max_epochs=epochs, **options)
    trainer.fit(module, train, loader(1))
    return trainer


@pytest.mark.filterwarnings("ignore:Found .* in eval mode", "ignore:.*does not have many workers")
@pytest.mark.parametrize("steps_per_call", [None, 1])
def test_train_of_the_users_own_is_called(steps_per_call: int | None) -> None:
    module = Module()
    fit(module, loader(), steps_per_call=steps_per_call)
    assert int(module.net.norm.num_batches_tracked) == 0
    assert module.net.training
    assert not module.net.norm.training
    assert not module.other.training  # as it was given


@pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:Found .* in eval mode")
def test_no_epoch_passes_without_a_batch() -> None:
    assert fit(Module(), Resetting(batches())).global_step == 6
    with pytest.raises(UserError, match=r"train_dataloader has no batch in epoch 2"):
        fit(Module(), (batch for batch in batches()))


@pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:Found .* in eval mode")
@pytest.mark.parametrize(
    ("losses", "min_epochs", "epochs"),
    [
        ([1, 2, 2, 0.5, 0.4, 0.3, 0.2, 0.1], 4, 8),  # it recovers when it may be stopped
        ([1, 2, 2, 2, 2, 2, 2, 2], 4, 4),
        ([1, 2, 2, 2, 2, 2, 2, 2], None, 3),
    ],
)
def test_early_stopping_decides_again_after_min_epochs(
    losses: list[float], min_epochs: int | None, epochs: int
) -> None:
    stopping = EarlyStopping("loss", patience=2)
    assert fit(Module(losses), loader(), stopping, epochs=8, min_epochs=min_epochs).current_epoch == epochs
