"""Parts as a user would write them: a task and a callback that log values of their own."""

from typing import Any

from lightning.pytorch import Callback, Trainer
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
