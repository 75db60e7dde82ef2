"""Eval mode for frozen normalization layers."""

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch import nn


class FrozenStatistics(Callback):
    """Keep fully frozen normalization layers in eval mode, so that their statistics do not change."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._hold(pl_module)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._hold(pl_module)

    @staticmethod
    def _hold(module: nn.Module) -> None:
        for part in module.modules():
            own = list(part.parameters(recurse=False))
            running = any(value is not None and "running" in name for name, value in part.named_buffers(recurse=False))
            if own and running and not any(parameter.requires_grad for parameter in own):
                part.eval()
