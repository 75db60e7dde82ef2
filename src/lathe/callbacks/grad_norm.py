"""Log the norm of the gradients."""

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DeepSpeedStrategy

from lathe.callbacks.module_access import net_of
from lathe.config.validation import validated
from lathe.data.steps import steps_before
from lathe.errors import UserError, require
from lathe.measure.processes import everyones
from lathe.measure.shards import whole


class GradNorm(Callback):
    """Log `grad_norm/total`, the 2-norm over all gradients before clipping, at each logged step.

    Gradients are those that the optimizer sees: summed over accumulated batches and over devices, without a loss scale.
    With several optimizers there is one `grad_norm/total` for each, with its number as a suffix. Under fsdp and tensor
    parallelism the norm is that of the whole net.
    """

    @validated
    def __init__(self, per_parameter: bool = False) -> None:
        self.per_parameter = per_parameter

    def skippable_steps(self, trainer: Trainer) -> float:
        """Count the steps before the next logged one."""
        return steps_before(trainer, trainer.log_every_n_steps)  # type: ignore[attr-defined]

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if isinstance(trainer.strategy, DeepSpeedStrategy):
            raise UserError("callbacks.grad_norm: DeepSpeed keeps the gradients to itself. Leave grad_norm out.")
        names, *others = everyones(list(net_of(pl_module).state_dict()))
        require(
            all(other == names for other in others),
            "callbacks.grad_norm: each process has other layers under this strategy. Leave grad_norm out.",
        )

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        if steps_before(trainer, trainer.log_every_n_steps) > 0:  # type: ignore[attr-defined]
            return
        owned = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        norms = {
            f"grad_norm/{name}": whole(torch.linalg.vector_norm(parameter.grad.detach())).to(pl_module.device)
            for name, parameter in net_of(pl_module).named_parameters()
            if parameter.grad is not None and id(parameter) in owned
        }
        if not norms:  # of an optimizer whose parameters are not trained in this step
            return
        several = [getattr(each, "optimizer", each) for each in trainer.optimizers]
        suffix = f"_{several.index(optimizer)}" if len(several) > 1 and optimizer in several else ""
        total = {f"grad_norm/total{suffix}": torch.linalg.vector_norm(torch.stack(list(norms.values())))}
        pl_module.log_dict(total | norms if self.per_parameter else total)
