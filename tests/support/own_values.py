"""A data module with lists as arguments, and components with values that a checkpoint can't hold."""

import collections
import datetime
import pathlib
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from support.own_lightning import LitNet
from support.own_parts import Table

# a component's value, and its description
ODD: dict[str, tuple[Any, str]] = {
    "scalar": (np.float64(0.5), "numpy.float64, .*: put float"),
    "array": (np.ones(2), "numpy.ndarray, .*: put torch.as_tensor"),
    "path": (pathlib.Path("x"), r"pathlib\S+, .*: put str"),
    "time": (datetime.datetime(2020, 1, 1), "datetime.datetime, .*: put str"),
    "defaultdict": (collections.defaultdict(list), "collections.defaultdict, .*: put dict"),
    "frozenset": (frozenset({1}), "frozenset, .*: put list"),
    "function": (lambda: 1, "function, .*: put str"),
}


class Listed(Table):
    def __init__(self, mean: Any = None, more: Any = None, folder: Any = None) -> None:
        super().__init__()
        self.save_hyperparameters()


class Keeping(Callback):
    def __init__(self, what: str) -> None:
        self.what = what

    def state_dict(self) -> dict[str, Any]:
        return {"rates": [1, ODD[self.what][0]]}


class KeepingModule(LitNet):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["mine"] = {"rate": np.float32(1)}


class KeepingExtra(LitNet):
    def get_extra_state(self) -> dict[str, Any]:
        return {"rate": 1.0}

    def set_extra_state(self, state: dict[str, Any]) -> None: ...


class KeepingData(Table):
    def state_dict(self) -> dict[str, Any]:
        return {"seen": np.int64(1)}


class Shown(Callback):
    """Exposes its arguments to a test."""

    last: Any = None

    def __init__(self, **options: Any) -> None:
        type(self).last = options

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint["shown"] = {**type(self).last, "weight": torch.ones(1)}
