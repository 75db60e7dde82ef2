"""What loops do with a batch beside its step."""

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins import Precision
from lightning.pytorch.trainer import call
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor

from lathe.data.transfer import HOOKS


class Batches:
    """What both loops do with a batch beside its step: who wants to be called, and where it has to be."""

    def __init__(self, trainer: Trainer, results: Any, hooks: tuple[str, ...], step: str) -> None:
        module = trainer.lightning_module
        self.module, self.results = module, results
        self.trainer: Any = trainer
        self.connector, self.strategy = trainer._logger_connector, trainer.strategy
        self.precision, self.device = trainer.precision_plugin, trainer.strategy.root_device
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]  # a connector sets it
        self.hooks = {name: overriding(callbacks, name) for name in hooks}
        self.own = {name: getattr(module, name) for name in hooks if overrides(module, name, LightningModule)}
        self.converts = type(self.precision).convert_input is not Precision.convert_input
        data = trainer.datamodule  # type: ignore[attr-defined]
        places = [module] if data is None else [module, data]
        self.moves = any(overrides(place, name, LightningModule) for place in places for name in HOOKS)
        self.step_name = step
        self.takes_index = is_param_in_hook_signature(getattr(module, step), "batch_idx", min_args=2)

    def moved(self, batch: Any) -> Any:
        """The batch in the net's number format and on its device."""
        if self.converts:
            batch = self.precision.convert_input(batch)
        if not self.moves and is_on(batch, self.device):
            return batch
        batch = self.module._on_before_batch_transfer(batch, dataloader_idx=0)
        return call._call_strategy_hook(self.trainer, "batch_to_device", batch, dataloader_idx=0)

    def begin(self, batch: Any) -> None:
        """`_LoggerConnector.on_batch_start`."""
        self.connector._first_loop_iter = self.connector._first_loop_iter is None
        results = self.results
        results.batch, results.batch_size, results.dataloader_idx = batch, None, None

    def end(self) -> bool:
        """`_LoggerConnector.on_batch_end`; whether anything was logged."""
        results = self.results
        logged = not all(one.has_reset for one in results.values())  # a key stays for the next epoch
        if logged:
            self.connector.on_batch_end()
        else:
            results.batch = results.batch_size = None
        return logged

    def call(self, name: str, *args: Any) -> Any:
        """The hooks of this name, of callbacks and then of the module, whose answer it returns."""
        found, own = self.hooks[name], self.own.get(name)
        if not found and own is None:
            return None
        trainer, module = self.trainer, self.module
        before = module.__dict__["_current_fx_name"]
        module.__dict__["_current_fx_name"] = name
        for hook in found:
            hook(trainer, module, *args)
        answer = own(*args) if own is not None else None
        module.__dict__["_current_fx_name"] = before
        return answer


def overrides(part: Any, name: str, base: type) -> bool:
    return name in vars(part) or getattr(type(part), name) is not getattr(base, name)


def overriding(callbacks: list[Callback], name: str) -> list[Callable[..., Any]]:
    found = [getattr(callback, name) for callback in callbacks if overrides(callback, name, Callback)]
    return [hook for hook in found if callable(hook)]


def is_on(batch: Any, device: torch.device) -> bool:
    parts = batch if type(batch) in (tuple, list) else (batch,)
    return all(type(part) is Tensor and part.device == device for part in parts)
