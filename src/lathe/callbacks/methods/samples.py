"""Samples that a method of compression looks at before training, which then begins at the first batch all the same."""

from collections.abc import Iterator
from itertools import islice
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from lathe.data.base import ExactDataModule
from lathe.measure.flops import net_input


def an_input(trainer: Trainer, pl_module: LightningModule, samples: int) -> Tensor:
    """The net's input for that many validation samples, on the trainer's device."""
    data: Any = trainer.datamodule if getattr(trainer, "datamodule", None) is not None else pl_module  # type: ignore[attr-defined]
    batch = net_input(next(iter(data.val_dataloader())))
    return batch[:samples].to(trainer.strategy.root_device)


def first_batches(trainer: Trainer, pl_module: LightningModule, count: int) -> Iterator[Any]:
    """Training batches of epoch 0, on the trainer's device; `rewind` follows."""
    loader: Any = (getattr(trainer, "datamodule", None) or pl_module).train_dataloader()
    for batch in islice(iter(loader), count):
        yield pl_module.transfer_batch_to_device(batch, trainer.strategy.root_device, 0)


def rewind(trainer: Trainer) -> None:
    """Lets training begin at the first batch again."""
    datamodule: Any = getattr(trainer, "datamodule", None)
    if isinstance(datamodule, ExactDataModule):
        datamodule.setup("fit")
