"""A small net, task, loader and Trainer for the tests of callbacks."""

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.loggers import Logger
from torch import Tensor, nn

from lathe.trainer import Trainer
from support.quiet import Batches, quiet_trainer


class TinyTask(LightningModule):
    """Like lathe's tasks: parameters in `net` only, and checkpoints under the net's own names."""

    def __init__(self, net: nn.Module | None = None, strips: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = net or nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        self.strips = strips

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        x, y = batch
        return {"loss": nn.functional.cross_entropy(self.net(x).float(), y)}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val/accuracy", (self.net(x).argmax(1) == y).float().mean(), batch_size=len(y))

    test_step = validation_step

    def val_dataloader(self) -> Any:
        return TinyLoader(1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.strips:
            checkpoint["state_dict"] = {k.removeprefix("net."): v for k, v in checkpoint["state_dict"].items()}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.strips:
            checkpoint["state_dict"] = {f"net.{k}": v for k, v in checkpoint["state_dict"].items()}


class TinyLoader(Batches):
    """Batches `(x [8, 3], y [8])`, the same in every epoch."""

    def __init__(self, batches: int = 6, dtype: torch.dtype = torch.float32) -> None:
        generator = torch.Generator().manual_seed(1)
        pairs = [
            (torch.randn(8, 3, generator=generator).to(dtype), torch.randint(0, 2, (8,), generator=generator))
            for _ in range(batches)
        ]
        super().__init__(pairs)


class MemoryLogger(Logger):
    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int | None, dict[str, float]]] = []

    name = "memory"
    version = "0"

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None: ...

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.append((step, dict(metrics)))


def make_trainer(*callbacks: Any, **options: Any) -> Trainer:
    defaults: dict[str, Any] = {
        "max_epochs": 2,
        "enable_checkpointing": any("Checkpoint" in type(c).__name__ for c in callbacks),
        "num_sanity_val_steps": 0,
        "log_every_n_steps": 2,
        "use_distributed_sampler": True,
    }
    return quiet_trainer(*callbacks, **{**defaults, **options})


def save_after(step: int, path: Path) -> Callback:
    """Return a callback that saves a checkpoint after an optimizer step."""

    def save(trainer: Any, *args: Any) -> None:
        if trainer.global_step == step:
            trainer.save_checkpoint(path)

    return LambdaCallback(on_train_batch_end=save)
