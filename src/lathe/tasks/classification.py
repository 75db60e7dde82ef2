"""Image classification: cross-entropy and accuracy."""

from collections.abc import Callable, Mapping
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lathe.config.types import Name, NonNegative, ShareBelowOne, SomeNames
from lathe.config.validation import validated
from lathe.data.order import IGNORE
from lathe.errors import ArgumentError, UserError
from lathe.tasks.metric_sums import stacked
from lathe.tasks.supervised import SupervisedTask

MAX_LOGITS = 2**14  # of a batch whose sums are deferred


class ClassificationTask(SupervisedTask):
    """Cross-entropy with optional label smoothing (Szegedy et al. 2016), or a user's loss.

    A batch is `(x, y)`: x [batch, channels, height, width], y either class numbers [batch], -100 in rows that do not
    count, or class probabilities [batch, classes], as of mixup. Accuracy uses the largest of these. Torchmetrics get
    the softmax [batch, classes] (Binary ones the second class's [batch]) and class numbers [batch].

    `class_weights` weigh the cross-entropy of a sample by its class: the loss is sum_i w[y_i] l_i / n with w scaled to
    a mean of 1, in training and evaluation. torch divides by sum_i w[y_i] instead, which depends on how samples are
    divided among devices.
    """

    metrics: tuple[str, ...] = ("loss", "accuracy")
    monitor = "val/accuracy"
    known = ("accuracy", "top5_accuracy")
    standard_step = True

    @validated
    def __init__(
        self,
        net: nn.Module,
        optimizer: Callable[[nn.Module], Optimizer] | None = None,
        scheduler: Callable[..., LRScheduler] | None = None,
        label_smoothing: ShareBelowOne = 0.0,
        init: Name | SomeNames | None = None,
        loss: Any = None,
        class_weights: Annotated[list[NonNegative], Field(min_length=1)] | None = None,
        metrics: Any = None,
    ) -> None:
        super().__init__(net, optimizer, scheduler, init, loss, metrics)
        self.label_smoothing = label_smoothing
        if loss is not None and (label_smoothing or class_weights is not None):
            name = "label_smoothing" if label_smoothing else "class_weights"
            raise ArgumentError(
                f"{name} has no effect with task.loss: pass it to that loss, such as "
                "task.loss={_target_: torch.nn.CrossEntropyLoss, "
                f"{'label_smoothing: 0.1' if label_smoothing else 'weight: [1, 2]'}}}."
            )
        self._weights: Tensor | None = None
        if class_weights is not None:
            weights = torch.tensor(list(class_weights), dtype=torch.float64)
            if not weights.sum() > 0:
                raise ArgumentError("class_weights: expected at least one above 0.")
            self._weights = weights * (len(weights) / weights.sum())
        self._deferrable: torch.Size | None = None  # shape of logits whose sums may be deferred

    def check_outputs(self, outputs: Tensor | None, facts: Mapping[str, Any]) -> None:
        super().check_outputs(outputs, facts)
        classes = facts.get("num_classes")
        if self._weights is not None and isinstance(classes, int) and len(self._weights) != classes:
            raise UserError(
                f"task.class_weights: expected a weight for each of data.num_classes={classes}, got "
                f"{len(self._weights)}."
            )
        if "top5_accuracy" in self.metrics and isinstance(classes, int) and classes <= 5:
            raise UserError(f"task.metrics=top5_accuracy is always 1 with data.num_classes={classes}: leave it out.")

    def dummy_targets(self, rows: int, width: int) -> Tensor:
        return torch.arange(rows) % width

    def losses(self, outputs: Tensor, batch: Any) -> dict[str, Tensor]:
        if self._loss is not None:
            return self.own_losses(outputs, batch[1])
        if self._weights is not None:
            return {"cross_entropy": self._weighted(outputs, batch[1])}
        smoothing = self.label_smoothing if self.training else 0.0
        target = batch[1]
        outputs = outputs.to(torch.promote_types(outputs.dtype, torch.float32))  # a half-precision sum loses digits
        if self.training or target.is_floating_point():
            return {"cross_entropy": F.cross_entropy(outputs, target, label_smoothing=smoothing)}
        # A batch without counted rows has no mean: 0 instead of NaN.
        total = F.cross_entropy(outputs, target, ignore_index=IGNORE, reduction="sum")
        return {"cross_entropy": total / (target != IGNORE).sum().clamp(min=1)}

    def sample_losses(self, outputs: Tensor, batch: Any) -> Tensor:
        """Return the cross-entropy of each row of logits [batch, classes], without smoothing or weights: [batch]."""
        return F.cross_entropy(self.cast_for_loss(outputs, batch[1]), batch[1], reduction="none")

    def _weighted(self, outputs: Tensor, target: Tensor) -> Tensor:
        assert self._weights is not None
        outputs = self.cast_for_loss(outputs, target)
        if self._weights.device != outputs.device or self._weights.dtype != outputs.dtype:
            self._weights = self._weights.to(outputs)
        smoothing = self.label_smoothing if self.training else 0.0
        each = F.cross_entropy(outputs, target, ignore_index=IGNORE, reduction="none", label_smoothing=smoothing)
        if target.is_floating_point():
            return (each * (target.to(outputs.dtype) @ self._weights)).mean()
        total = (each * self._weights[target.clamp(min=0)]).sum()
        return total / (target != IGNORE).sum().clamp(min=1)

    def reduce(self, outputs: Tensor, batch: Any, loss: Tensor) -> Tensor:
        target = batch[1]
        if target.is_floating_point():
            target = target.argmax(dim=1)
        outputs = outputs.detach()
        count = (target != IGNORE).sum()
        if self._named is None:
            correct = (outputs.argmax(dim=1) == target).sum()
            return stacked(loss, [correct], count)
        sums = {"accuracy": (outputs.argmax(dim=1) == target).sum()} if "accuracy" in self._named else {}
        if "top5_accuracy" in self._named:
            top = outputs.topk(min(5, outputs.shape[1]), dim=1).indices
            sums["top5_accuracy"] = (top == target.unsqueeze(1)).sum()
        return stacked(loss, [sums[name] for name in self._named], count)

    def reduce_later(self, outputs: Tensor, batch: Any) -> Tensor | None:
        """Return the targets, if `reduce` is this class's own, targets are class numbers, and logits are few and on the
        CPU: another device works while the host continues.
        """
        if outputs.shape != self._deferrable or not self.training:
            fits = outputs.ndim == 2 and outputs.numel() <= MAX_LOGITS and outputs.device.type == "cpu"
            own = type(self).reduce is ClassificationTask.reduce and self._named in (None, ["accuracy"])
            if not (fits and own and self.training):
                return None
            self._deferrable = outputs.shape
        target: Tensor = batch[1]
        return None if target.is_floating_point() else target

    def reduce_several(self, deferred: list[tuple[Any, Any, Tensor]]) -> Any:
        outputs, target_rows, losses = zip(*deferred, strict=True)
        targets = torch.stack(target_rows).numpy()
        predictions = torch.stack(outputs).float().numpy().argmax(axis=2)
        dtype = np.float64 if self._sums_dtype == torch.float64 else np.float32
        count = (targets != IGNORE).sum(axis=1).astype(dtype)
        rows = np.empty((len(deferred), 3), dtype)
        rows[:, 0] = torch.stack(losses).to(self._sums_dtype).numpy() * count
        rows[:, 1], rows[:, 2] = (predictions == targets).sum(axis=1), count
        return rows

    def counted(self, targets: Tensor) -> Tensor | None:
        return None if targets.is_floating_point() else targets != IGNORE

    def scored(self, outputs: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
        outputs, targets = self._counting(self.cast_for_loss(outputs, batch[1]), batch[1])
        return outputs.softmax(dim=1), targets.argmax(dim=1) if targets.is_floating_point() else targets
