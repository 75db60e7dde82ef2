"""A data module with lists as arguments, and components with values that a checkpoint can't hold."""

import pathlib
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from support.own_lightning import LitNet
from support.own_parts import Table


class Listed(Table):
    def __init__(self, mean: Any = None, more: Any = None, folder: Any = None) -> None:
        super().__init__()
        self.save_hyperparameters()


class Keeping(Callback):
    def state_dict(self) -> dict[str, Any]:
        return {"rates": [1, pathlib.Path("x")]}


class KeepingModule(LitNet):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["mine"] = {
            "rate": pathlib.Path("x"),
            "steps": checkpoint["loops"] and len(checkpoint["optimizer_states"]),
        }


class Numbers(LitNet):
    """A learning rate and a state that NumPy computes, and hyper-parameters that are no plain values."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        self.save_hyperparameters({"scaler": pathlib.PurePath("x"), "rate": np.float64(0.5)})

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5 * (1 + np.cos(np.pi * step / 100)))
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["mine"] = {"rate": np.float32(0.25)}


class OwnSchedule(LitNet):
    """Keeps its schedule as an attribute, and steps it itself."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return optimizer

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        self.schedule.step()


class Adapter(LitNet):
    """Keeps a frozen part out of its checkpoints."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        self.strict_loading = False
        self.frozen = torch.nn.Linear(2, 2).requires_grad_(False)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        found = super().state_dict(*args, **kwargs)
        for name in [name for name in found if "frozen." in name]:
            del found[name]
        return found


class KeepingExtra(LitNet):
    def get_extra_state(self) -> dict[str, Any]:
        return {"rate": 1.0}

    def set_extra_state(self, state: dict[str, Any]) -> None: ...


class KeepingData(Table):
    def state_dict(self) -> dict[str, Any]:
        return {"seen": pathlib.Path("x")}


class Shown(Callback):
    """Exposes its arguments to a test."""

    last: Any = None

    def __init__(self, **options: Any) -> None:
        type(self).last = options

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint["shown"] = {**type(self).last, "weight": torch.ones(1)}
