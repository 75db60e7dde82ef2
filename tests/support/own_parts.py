"""Components as users write them: a task and a callback that log values, and a plain data module."""

from typing import Any

import torch
from lightning.pytorch import Callback, LightningDataModule, Trainer
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, WeightedRandomSampler
from torchmetrics import MeanMetric

from lathe.tasks import ClassificationTask


class Logging(ClassificationTask):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.seen = MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("own/step", float(self.trainer.global_step + 1))
        self.log("own/both", loss, on_step=True, on_epoch=True)
        self.log("own/largest", loss, on_step=False, on_epoch=True, reduce_fx="max")
        self.seen.update(loss.detach())
        self.log("own/seen", self.seen, on_step=False, on_epoch=True)
        if batch_idx == 1:
            self.log("own/rare", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.log("own/batches", 1.0, reduce_fx="sum")
        self.log("own/worse", float(-self.trainer.current_epoch))
        self.log("own/each", 1.0, on_step=True, on_epoch=True)


class Note(Callback):
    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        pl_module.log("own/note", float(trainer.global_step + 1))


class Noisy(Dataset[Any]):
    """Samples that are drawn again at each access."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        return self.x[row] + 0.1 * torch.randn(self.x.shape[1:]), self.y[row]


class Endless(IterableDataset[Any]):
    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.samples = list(zip(x, y, strict=True))

    def __iter__(self) -> Any:
        return iter(self.samples)


class Table(LightningDataModule):
    """Two classes of 4 x 4 images in plain DataLoaders."""

    def __init__(self, kind: str = "table", size: int = 16, n: int = 88, shuffle: bool = True, **options: Any) -> None:
        super().__init__()
        y = torch.arange(n) % 2
        x = torch.randn(n, 1, 4, 4, generator=torch.Generator().manual_seed(0)) + y.view(-1, 1, 1, 1)
        kinds: dict[str, Any] = {"noisy": Noisy, "endless": Endless}
        self.data = kinds.get(kind, TensorDataset)(x, y)
        self.held_out = TensorDataset(x, y)
        self.kind, self.size, self.shuffle, self.options = kind, size, shuffle, options

    def train_dataloader(self) -> Any:
        if self.kind == "sequential":
            return CombinedLoader([DataLoader(self.data, self.size)], "sequential")
        if self.kind == "endless":
            return DataLoader(self.data, self.size, **self.options)
        if self.kind == "weighted":
            return DataLoader(
                self.data, self.size, sampler=WeightedRandomSampler([1.0] * len(self.data), len(self.data))
            )
        return DataLoader(self.data, self.size, shuffle=self.shuffle, **self.options)

    def val_dataloader(self) -> Any:
        return [] if self.kind == "unvalidated" else DataLoader(self.held_out, 10)

    def test_dataloader(self) -> Any:
        return DataLoader(TensorDataset(*self.held_out[:7]), 4)
