"""Components that rely on Lightning's contracts: several loaders, several steps in a batch, custom states."""

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.optim.lr_scheduler import ExponentialLR

from support.own_lightning import Both, LitNet
from support.own_parts import Table


class Uneven(Both):
    """Steps one optimizer with each batch and the other with every second one, and steps its schedules."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        body, head = self.optimizers()
        loss = super().training_step(batch, batch_idx)
        self.zero_grad()
        self.manual_backward(loss)
        self.log("rate", body.param_groups[0]["lr"])
        self.log("batches", float(self.trainer.fit_loop.total_batch_idx + 1))
        for optimizer in (body, head)[: 2 - batch_idx % 2]:
            optimizer.step()
        for schedule in self.lr_schedulers():
            schedule.step()
        return loss

    def configure_optimizers(self) -> Any:
        optimizers = super().configure_optimizers()
        return optimizers, [ExponentialLR(optimizer, 0.9) for optimizer in optimizers]


class Gathering(LitNet):
    """Steps with the gradients of four batches; an epoch has six."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        optimizer: Any = self.optimizers()
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss / 4)
        if self.trainer.fit_loop.total_batch_idx % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()
        return loss


class Counted(Table):
    """Counts epochs, and saves the count in checkpoints."""

    epochs = 0

    def state_dict(self) -> dict[str, Any]:
        return {"epochs": self.epochs}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.epochs = state_dict["epochs"]


class Counting(Callback):
    """Counts too, in both hooks that save a callback's state."""

    def __init__(self) -> None:
        self.epochs = self.words = 0

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.epochs += 1
        self.words += 1

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        pl_module.log_dict({"callback_epochs": float(self.epochs), "callback_words": float(self.words)})

    def state_dict(self) -> dict[str, Any]:
        return {"epochs": self.epochs}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.epochs = state_dict["epochs"]

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint["words"] = self.words

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self.words = checkpoint["words"]


class Stateful(LitNet):
    """Counts the epochs of its data, and logs the saved count in a test."""

    def on_train_epoch_start(self) -> None:
        self.trainer.datamodule.epochs += 1

    def on_test_epoch_end(self) -> None:
        self.log("data_epochs", float(self.trainer.datamodule.epochs))


class Clipping(LitNet):
    """Clips its gradients itself, by value, and logs each batch of a validation."""

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        assert (gradient_clip_val, gradient_clip_algorithm) == (None, None)
        self.clip_gradients(optimizer, gradient_clip_val=0.001, gradient_clip_algorithm="value")
        largest = max(float(value.grad.abs().max()) for value in self.parameters() if value.grad is not None)
        self.log("largest", largest)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("shown", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("each", float(batch_idx), on_step=True, on_epoch=True)
