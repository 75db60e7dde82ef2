"""Parts that hold Lathe to what Lightning promises: several loaders, several steps in a batch, states of their own."""

from typing import Any

from torch.utils.data import DataLoader, TensorDataset

from support.own_lightning import LitNet
from support.own_parts import Table


class Several(LitNet):
    """Validates and tests on several loaders, and names its metrics in both ways."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        loss = self.losses(batch)
        self.log("val_loss", loss)
        self.log(f"named_{dataloader_idx}", loss, add_dataloader_idx=False)

    def on_validation_epoch_end(self) -> None:
        self.log("rounds", float(self.current_epoch))

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("test_loss", self.losses(batch))


class TwoTables(Table):
    """With two loaders for each evaluation."""

    def val_dataloader(self) -> Any:
        return [DataLoader(self.held_out, 10), DataLoader(TensorDataset(*self.held_out[:30]), 10)]

    test_dataloader = val_dataloader
