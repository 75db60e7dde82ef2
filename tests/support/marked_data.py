"""A data module whose hooks each add a power of two, and a net that records its inputs."""

from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate, get_worker_info

from lathe.nets.mlp import MLP

DATA = 64  # initial value, larger than the noise
HOOKS = {"worker_init_fn": 1, "collate_fn": 2, "__iter__": 4, "before": 8, "transfer": 16, "after": 32}
ALL = DATA + sum(HOOKS.values())
SEEN: set[int] = set()  # inputs of the net, rounded down, without noise


class Recording(MLP):
    def forward(self, x: Tensor) -> Tensor:
        if type(x) is Tensor and x.device.type == "cpu" and not torch.compiler.is_compiling():
            SEEN.update(value for value in x.detach().floor().int().unique().tolist() if value >= DATA)
        return super().forward(x / ALL)


class Marked(Dataset[Any]):
    mark = 0

    def __init__(self, n: int) -> None:
        self.x = DATA + 0.9 * torch.rand(n, 1, 4, 4, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        return self.x[row] + self.mark, row % 2


def mark_dataset(worker: int) -> None:
    """The idiom of torch's documentation."""
    info: Any = get_worker_info()
    info.dataset.mark = HOOKS["worker_init_fn"]


def plus(batch: Any, hook: str) -> Any:
    return [batch[0] + HOOKS[hook], batch[1]]


def collate(samples: list[Any]) -> Any:
    return plus(default_collate(samples), "collate_fn")


class OwnLoader(DataLoader[Any]):
    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return (plus(batch, "__iter__") for batch in super().__iter__())


class MarkedData(LightningDataModule):
    """A data module with marking hooks. `own=False` uses torch's DataLoader, without the mark of `__iter__`."""

    def __init__(self, own: bool = True, n: int = 64) -> None:
        super().__init__()
        self.own, self.data = own, Marked(n)
        self.stages = set[str]()  # in which the last hook was called

    def _loader(self, shuffle: bool = False) -> Any:
        kind = OwnLoader if self.own else DataLoader
        return kind(self.data, 16, shuffle, num_workers=1, collate_fn=collate, worker_init_fn=mark_dataset)

    def train_dataloader(self) -> Any:
        return self._loader(shuffle=True)

    def val_dataloader(self) -> Any:
        return self._loader()

    test_dataloader = val_dataloader

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return plus(batch, "before")

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        return plus(super().transfer_batch_to_device(batch, device, dataloader_idx), "transfer")

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        trainer: Any = self.trainer
        self.stages.add("train" if trainer.training else "val" if trainer.validating else "test")
        return plus(batch, "after")
