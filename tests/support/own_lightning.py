"""LightningModules as users write them, without Lathe: correct ones and incorrect ones."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR, ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, IterableDataset
from torchmetrics.classification import MulticlassAccuracy

from support.own_parts import Table

# overrides of a short run
QUICK = (
    "model=lightning",
    "trainer.accelerator=cpu",
    "trainer.enable_progress_bar=false",
    "trainer.enable_model_summary=false",
    "trainer.max_epochs=2",
    "trainer.log_every_n_steps=5",
    "callbacks.throughput=null",
)


class Plain(LightningModule):
    """Has no optimizers, and has attributes that Lathe's tasks use differently."""

    def __init__(self, features: int = 64, classes: int = 10, width: int = 16, dropout: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        layers = (nn.Flatten(), nn.Linear(features, width), nn.ReLU(), nn.Dropout(dropout), nn.Linear(width, classes))
        self.net = nn.Sequential(*layers)
        self.head = nn.Linear(classes, classes)
        self.metrics = nn.ModuleDict({"accuracy": MulticlassAccuracy(classes, average="micro")})
        self.monitor, self.unit, self.logged, self.meters = "nothing", 3, 4, 5

    def losses(self, batch: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.head(self.net(x)), y)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.losses(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.metrics["accuracy"](self.head(self.net(x)), y)
        self.log("val_accuracy", self.metrics["accuracy"])
        self.log("val_loss", self.losses(batch), sync_dist=True)
        self.log("val_seen", float(len(y)), reduce_fx="sum", sync_dist=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.losses(batch), sync_dist=True)
        self.log("test_seen", float(len(batch[1])), reduce_fx="sum", sync_dist=True)


class LitNet(Plain):
    """A complete module."""

    def __init__(self, lr: float = 0.1, **options: Any) -> None:
        super().__init__(**options)
        self.save_hyperparameters()

    def configure_optimizers(self) -> Any:
        optimizer = SGD(self.parameters(), lr=self.hparams["lr"], momentum=0.9)
        return {"optimizer": optimizer, "lr_scheduler": StepLR(optimizer, 1, gamma=0.5)}


class Unsynchronised(LitNet):
    """Logs the monitored metric without sync_dist."""

    def log(self, name: str, *args: Any, **options: Any) -> None:
        super().log(name, *args, **({**options, "sync_dist": False} if name == "val_loss" else options))


class Plainest(LitNet):
    """Has only an optimizer, with a learning rate that is not an argument."""

    def configure_optimizers(self) -> Any:
        return SGD(self.parameters(), lr=0.2, momentum=0.9)


class Warm(LitNet):
    """Has a schedule that starts at a learning rate of 0, stepped with every step."""

    def configure_optimizers(self) -> Any:
        optimizer = SGD(self.parameters(), lr=self.hparams["lr"], momentum=0.9)
        return [optimizer], [{"scheduler": LambdaLR(optimizer, lambda step: step / 5), "interval": "step"}]


class Slope(LitNet):
    """Needs gradients in validation, as meta-learning and forces do."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        with torch.enable_grad():
            x = batch[0].clone().requires_grad_()
            (slope,) = torch.autograd.grad(self.losses((x, batch[1])), x)
        self.log("val_loss", slope.abs().sum())


class Shaped(LitNet):
    """Adds to a tuple that it is given."""

    def __init__(self, shape: tuple[int, ...], **options: Any) -> None:
        super().__init__(**options)
        self.example_input_array = torch.zeros((1,) + shape)  # noqa: RUF005  # as users write it


class Planned(LitNet):
    """Has a schedule for `length` steps or epochs, by default for the whole run."""

    def __init__(self, kind: str = "cycle", length: int | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.save_hyperparameters()

    def configure_optimizers(self) -> Any:
        length, trainer = self.hparams["length"], self.trainer
        optimizer = SGD(self.parameters(), lr=self.hparams["lr"], momentum=0.9)
        if self.hparams["kind"] == "cosine":
            return {"optimizer": optimizer, "lr_scheduler": CosineAnnealingLR(optimizer, length or trainer.max_epochs)}
        cycle = OneCycleLR(optimizer, self.hparams["lr"], total_steps=length or int(trainer.estimated_stepping_batches))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": cycle, "interval": "step"}}


class Waits(LitNet):
    """Has a schedule on a metric: it reduces the rate by a tenth at each step, and tracks the best value."""

    def __init__(
        self, interval: str = "epoch", frequency: int = 1, waits_for: str = "val_loss", **options: Any
    ) -> None:
        super().__init__(**options)
        self.save_hyperparameters()

    def configure_optimizers(self) -> Any:
        optimizer = SGD(self.parameters(), lr=self.hparams["lr"], momentum=0.9)
        waiting = ReduceLROnPlateau(optimizer, "max", factor=0.9, patience=0, threshold=1.0)
        schedule = {"scheduler": waiting, "monitor": self.hparams["waits_for"]}
        of = {"interval": self.hparams["interval"], "frequency": self.hparams["frequency"]}
        return {"optimizer": optimizer, "lr_scheduler": {**schedule, **of}}


class Both(LitNet):
    """Has two optimizers, which Lightning does not step automatically."""

    def configure_optimizers(self) -> Any:
        return [SGD(self.net.parameters(), lr=0.1), SGD(self.head.parameters(), lr=0.1)]


class Checkpointing(LitNet):
    """Has a callback that saves checkpoints."""

    def configure_callbacks(self) -> list[Callback]:
        return [ModelCheckpoint(monitor="val_loss", save_last=True)]


class Manual(LitNet):
    """Steps its optimizer itself."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        optimizer.step()
        return loss


class Turns(Both):
    """Steps its two optimizers itself, in the same batch."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        optimizers: Any = self.optimizers()
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return loss


class Late(LitNet):
    """Makes a layer in configure_model, and saves a value in checkpoints."""

    word = "new"

    def configure_model(self) -> None:
        if not hasattr(self, "late"):
            self.late = nn.Linear(10, 10)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["word"] = "kept"

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.word = checkpoint["word"]


class Stepless(LightningModule):
    pass


class Untested(LightningModule):
    training_step = LitNet.training_step
    configure_optimizers = LitNet.configure_optimizers


class Loading(LitNet):
    def train_dataloader(self) -> Any:
        raise AssertionError


class WithData(LitNet):
    """Defines the loaders of `support.own_parts.Table` itself."""

    def train_dataloader(self) -> Any:
        return Table().train_dataloader()

    def val_dataloader(self) -> Any:
        return Table().val_dataloader()


class Episodes(IterableDataset[Any]):
    """Samples whose targets the net makes, as in reinforcement learning."""

    def __init__(self, module: LightningModule) -> None:
        self.module = module

    def __iter__(self) -> Iterator[Any]:
        for _ in range(32):
            x = torch.randn(1, 4, 4)
            with torch.no_grad():
                yield x, self.module.net(x[None]).argmax()  # type: ignore[operator]


class Playing(LitNet):
    def train_dataloader(self) -> Any:
        return DataLoader(Episodes(self), 8)


class Keeping(LitNet):
    def __init__(self, make: Callable[[], Any] = nn.ReLU, **options: Any) -> None:
        super().__init__(**options)
        self.act = make()
        self.save_hyperparameters()
