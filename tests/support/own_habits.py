"""Habits from plain Lightning and other templates."""

from pathlib import Path
from typing import Any

import torch
from torch.optim import SGD
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, Subset

from support.own_lightning import LitNet
from support.own_parts import Table


class Waiting(LitNet):
    """Its learning rate depends on a training metric that differs between ranks: only the first rank's falls."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        falls = -float(self.global_step) if self.trainer.global_rank == 0 else float(self.global_step)
        self.log("own", falls, on_step=True)
        return loss

    def on_train_end(self) -> None:
        (optimizer,) = self.trainer.optimizers
        Path(f"{self.trainer.default_root_dir}/rate{self.trainer.global_rank}").write_text(
            str(optimizer.param_groups[0]["lr"])
        )

    def configure_optimizers(self) -> Any:
        optimizer = SGD(self.parameters(), lr=self.hparams["lr"])
        waiting = ReduceLROnPlateau(optimizer, factor=0.5, patience=1)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": waiting, "monitor": "own", "interval": "step"},
        }


class Gathers(LitNet):
    """Gathers the ranks' outputs in validation."""

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().validation_step(batch, batch_idx)
        assert len(self.all_gather(torch.ones(1))) == self.trainer.world_size
        self.all_gather({"outputs": batch[0]})
        return loss


class Divided(Table):
    """Divides its batch size by the number of devices, as other templates do."""

    def __init__(self, batch_size: int = 16) -> None:
        super().__init__(size=batch_size)
        self.batch_size = batch_size

    def setup(self, stage: str) -> None:
        self.size = self.batch_size // self.trainer.world_size  # type: ignore[union-attr]


class Odd(Table):
    """Has an odd number of validation samples."""

    def val_dataloader(self) -> Any:
        return DataLoader(Subset(self.held_out, range(87)), 10)
