"""Count recompilations during training."""

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch._dynamo.utils import counters


class Graphs(Callback):
    """Count the graphs of torch.compile in the newest fit of this process.

    `made` counts all, `anew` those after the first optimizer step: recompilations, as all batches have one size.
    """

    skippable_steps = None  # every step is needed

    made = anew = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        type(self).made = type(self).anew = 0
        self._before, self._first = counters["stats"]["unique_graphs"], -1

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        type(self).made = counters["stats"]["unique_graphs"] - self._before
        if self._first < 0 and trainer.global_step > 0:
            self._first = self.made
        if self._first >= 0:
            type(self).anew = self.made - self._first
