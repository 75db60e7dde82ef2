"""LightningDataModules as users write them, with and without a batch size."""

from typing import Any

from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader, TensorDataset

from support.own_datasets import Flow, pictures


class Sized(LightningDataModule):
    """Images of two classes in plain DataLoaders."""

    def __init__(self, batch_size: int = 32, n: int = 200, drop_last: bool = False) -> None:
        super().__init__()
        self.batch_size, self.drop_last = batch_size, drop_last
        self.data: Any = TensorDataset(*pictures(n))

    def train_dataloader(self) -> Any:
        return DataLoader(self.data, self.batch_size, shuffle=True, drop_last=self.drop_last)

    def val_dataloader(self) -> Any:
        return DataLoader(self.data, 50)

    test_dataloader = val_dataloader


class Streaming(Sized):
    """A DataLoader of an iterable dataset of unknown length."""

    def train_dataloader(self) -> Any:
        return DataLoader(Flow(len(self.data)), self.batch_size)
