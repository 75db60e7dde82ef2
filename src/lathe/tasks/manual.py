"""What a module that steps its optimizers itself asks of a run: rows with the learning rates of their steps, and
checkpoints with the gradients that it has added up for a later one.
"""

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import LearningRateMonitor
from torch import Tensor
from torch.optim import Optimizer

KEY = "gradients"  # in a checkpoint, by the names of their parameters


class KeepsGradients(Callback):
    """Keeps with a checkpoint the gradients that no optimizer has stepped with since they were added to, so that a
    module that steps with every fourth batch goes on amid the four. Before a validation Lightning drops them itself. On
    several processes they are rank 0's, which DDP has made everyone's.
    """

    def __init__(self) -> None:
        self._waiting: set[Tensor] = set()  # parameters whose gradients no step has used
        self._hooks: list[Any] = []
        self._restored: dict[str, Tensor] = {}

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        found = checkpoint.get(KEY, {})
        shapes = {name: value.shape for name, value in pl_module.named_parameters()}
        for name, value in found.items():
            if shapes.get(name) != value.shape:
                raise ValueError(f"the gradient of {name} is {list(value.shape)}, which no parameter of this net is")
        self._restored = found

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        restored, self._restored = self._restored, {}
        self._waiting = set()
        for name, parameter in pl_module.named_parameters():
            if name in restored:
                parameter.grad = restored[name].to(parameter)
                self._waiting.add(parameter)
            if parameter.requires_grad:
                self._hooks.append(parameter.register_post_accumulate_grad_hook(self._waiting.add))
        self._hooks += [
            one.register_step_post_hook(self._stepped) for one in trainer.optimizers if isinstance(one, Optimizer)
        ]

    def _stepped(self, optimizer: Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            self._waiting.difference_update(group["params"])

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        kept = {
            name: value.grad.detach().clone()
            for name, value in pl_module.named_parameters()
            if value in self._waiting and value.grad is not None and value.grad.any()
        }
        if kept:
            checkpoint[KEY] = kept

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []


class Rates:
    """Notes what `LearningRateMonitor` logs as a batch begins, and has it logged once the batch's row is known."""

    def __init__(self) -> None:
        self._noted: list[tuple[dict[str, Any], dict[str, Any]]] = []

    def note(self, trainer: Any) -> None:
        self._noted = [
            (group, {name: _kept(value) for name, value in group.items() if name != "params"})
            for optimizer in trainer.optimizers
            for group in optimizer.param_groups
        ]

    def log(self, trainer: Any) -> None:
        """Once for each batch; the groups have the noted values meanwhile."""
        noted, self._noted = self._noted, []
        now = [dict(group) for group, _ in noted]
        try:
            for group, before in noted:
                group.update(before)
            for monitor in trainer.callbacks if noted else ():
                if isinstance(monitor, LearningRateMonitor):
                    LearningRateMonitor.on_train_batch_start(monitor, trainer)
        finally:
            for (group, _), after in zip(noted, now, strict=True):
                group.update(after)


def _kept(value: Any) -> Any:
    """A rate that is a tensor changes in its place."""
    return value.clone() if isinstance(value, Tensor) else value
