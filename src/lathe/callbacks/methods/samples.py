"""Samples for compression methods before training, without consuming the training batches."""

from collections.abc import Iterator
from itertools import islice
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from lathe.data.base import ExactDataModule
from lathe.data.order import EpochLoader
from lathe.data.transfer import train_batches, val_batches
from lathe.measure.flops import net_input


def an_input(trainer: Trainer, pl_module: LightningModule, samples: int) -> Tensor:
    """Return the net's input for `samples` validation samples, on the trainer's device."""
    data: Any = getattr(trainer, "datamodule", None) or pl_module
    return net_input(next(iter(val_batches(data))))[:samples]


def first_batches(trainer: Trainer, pl_module: LightningModule, count: int) -> Iterator[Any]:
    """Yield training batches of epoch 0, on the trainer's device; call `rewind` afterwards."""
    yield from islice(train_batches(getattr(trainer, "datamodule", None) or pl_module), count)


def rewind(trainer: Trainer) -> None:
    """Reset the train loader to its first batch."""
    datamodule: Any = getattr(trainer, "datamodule", None)
    if isinstance(datamodule, ExactDataModule):
        datamodule.setup("fit")
    elif isinstance(loader := datamodule and datamodule.train_dataloader(), EpochLoader):
        loader.load_state_dict({"epoch": 0, "batch": 0})
