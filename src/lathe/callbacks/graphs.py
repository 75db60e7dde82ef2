"""What torch.compile does once training is under way."""

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch._dynamo.utils import counters


class Graphs(Callback):
    """Counts the graphs that the compiler makes in training after the first optimizer step: each is one too many, as
    all batches have one size.
    """

    anew = 0

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        made = counters["stats"]["unique_graphs"]
        if trainer.global_step <= 1:
            self.first = made
        type(self).anew = made - self.first
