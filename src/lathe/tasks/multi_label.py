"""Multi-label classification: binary cross-entropy of each label, or a user's loss."""

from collections.abc import Callable, Mapping
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lathe.config.types import Name, NonNegative, SomeNames
from lathe.config.validation import validated
from lathe.data.order import IGNORE
from lathe.errors import ArgumentError, UserError
from lathe.tasks.metric_sums import stacked
from lathe.tasks.supervised import SupervisedTask


class MultiLabelTask(SupervisedTask):
    """A batch is `(x, y)`: y [batch, labels] of 0 and 1, or -100 throughout a row that only fills up a batch. The net
    returns a logit for each label. `accuracy` is the share of labels that are right at a probability of one half;
    torchmetrics get the sigmoid and integers [batch, labels]. `pos_weight` weighs the ones of each label.
    """

    metrics: tuple[str, ...] = ("loss", "accuracy")
    known = ("accuracy",)
    standard_step = True
    predicts = "labels"

    @validated
    def __init__(
        self,
        net: nn.Module,
        optimizer: Callable[[nn.Module], Optimizer] | None = None,
        scheduler: Callable[..., LRScheduler] | None = None,
        init: Name | SomeNames | None = None,
        loss: Any = None,
        pos_weight: Annotated[list[NonNegative], Field(min_length=1)] | None = None,
        metrics: Any = None,
    ) -> None:
        super().__init__(net, optimizer, scheduler, init, loss, metrics)
        if loss is not None and pos_weight is not None:
            raise ArgumentError("pos_weight has no effect with task.loss: leave one of them out.")
        self._pos_weight = None if pos_weight is None else torch.tensor(list(pos_weight))

    def check_outputs(self, outputs: Tensor | None, facts: Mapping[str, Any]) -> None:
        super().check_outputs(outputs, facts)
        labels = None if outputs is None else outputs.shape[-1]
        if self._pos_weight is not None and labels is not None and len(self._pos_weight) != labels:
            raise UserError(
                f"task.pos_weight: expected {labels} weights, one for each logit, got {len(self._pos_weight)}."
            )

    def dummy_targets(self, rows: int, width: int) -> Tensor:
        return ((torch.arange(rows)[:, None] + torch.arange(width)) % 2).float()

    def cast_for_loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if outputs.shape != targets.shape:
            raise UserError(
                f"The net returns {list(outputs.shape)} for labels {list(targets.shape)}: expected [batch, labels]."
            )
        return super().cast_for_loss(outputs, targets)

    def counted(self, targets: Tensor) -> Tensor | None:
        return (targets != IGNORE).all(dim=1)

    def own_losses(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        return super().own_losses(outputs, targets.to(torch.promote_types(outputs.dtype, torch.float32)))

    def losses(self, outputs: Tensor, batch: Any) -> dict[str, Tensor]:
        if self._loss is not None:
            return self.own_losses(outputs, batch[1])
        outputs, targets = self._counting(self.cast_for_loss(outputs, batch[1]), batch[1])
        if not len(targets):
            return {"binary_cross_entropy": outputs.sum()}
        weight = None if self._pos_weight is None else self._pos_weight.to(outputs)
        loss = F.binary_cross_entropy_with_logits(outputs, targets.to(outputs.dtype), pos_weight=weight)
        return {"binary_cross_entropy": loss}

    def reduce(self, outputs: Tensor, batch: Any, loss: Tensor) -> Tensor:
        outputs, targets = self._counting(outputs.detach(), batch[1])
        right = ((outputs > 0) == (targets > 0.5)).float().mean(dim=1).sum()
        sums = [right] if "accuracy" in self.metrics else []
        return stacked(loss, sums, len(targets))

    def scored(self, outputs: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
        outputs, targets = self._counting(self.cast_for_loss(outputs, batch[1]), batch[1])
        return outputs.sigmoid(), targets.long()
