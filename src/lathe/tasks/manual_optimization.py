"""Checkpoints of a module with manual optimization."""

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer

KEY = "gradients"  # in a checkpoint, by the names of their parameters


class GradientCheckpoint(Callback):
    """Save the gradients that no optimizer step has used yet, so that a module that steps with every fourth batch
    resumes between two steps.

    Lightning drops them before a validation. With several processes they are rank 0's, which are equal under DDP.
    """

    def __init__(self) -> None:
        self._unused: set[Tensor] = set()  # parameters whose gradients no step has used
        self._hooks: list[Any] = []
        self._restored: dict[str, Tensor] = {}

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        saved = checkpoint.get(KEY, {})
        shapes = {name: value.shape for name, value in pl_module.named_parameters()}
        for name, value in saved.items():
            if shapes.get(name) != value.shape:
                raise ValueError(f"no parameter fits the saved gradient of {name}, {list(value.shape)}")
        self._restored = saved

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        restored, self._restored = self._restored, {}
        self._unused = set()
        for name, parameter in pl_module.named_parameters():
            if name in restored:
                parameter.grad = restored[name].to(parameter)
                self._unused.add(parameter)
            if parameter.requires_grad:
                self._hooks.append(parameter.register_post_accumulate_grad_hook(self._unused.add))
        self._hooks += [
            one.register_step_post_hook(self._stepped) for one in trainer.optimizers if isinstance(one, Optimizer)
        ]

    def _stepped(self, optimizer: Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            self._unused.difference_update(group["params"])

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        gradients = {
            name: value.grad.detach().clone()
            for name, value in pl_module.named_parameters()
            if value in self._unused and value.grad is not None and value.grad.any()
        }
        if gradients:
            checkpoint[KEY] = gradients

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
