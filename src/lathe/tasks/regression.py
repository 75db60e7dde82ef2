"""Regression: the mean squared error, or a user's loss."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lathe.config.types import Name, SomeNames
from lathe.config.validation import validated
from lathe.errors import UserError
from lathe.tasks.metric_sums import stacked
from lathe.tasks.supervised import SupervisedTask


class RegressionTask(SupervisedTask):
    """A batch is `(x, y)`: y float [batch] or [batch, values], like the net's outputs; outputs [batch, 1] count as
    [batch]. Losses and torchmetrics get both in the shape of y. The metrics `mae` and `mse` are means over all values,
    `rmse` is the root of `mse`. Every row counts.
    """

    metrics: tuple[str, ...] = ("loss", "mae", "mse")
    computed: tuple[str, ...] = ("rmse",)
    minimised = ("loss", "mae", "mse", "rmse")
    known = ("mae", "mse", "rmse")
    standard_step = True
    predicts = "values"

    @validated
    def __init__(
        self,
        net: nn.Module,
        optimizer: Callable[[nn.Module], Optimizer] | None = None,
        scheduler: Callable[..., LRScheduler] | None = None,
        init: Name | SomeNames | None = None,
        loss: Any = None,
        metrics: Any = None,
    ) -> None:
        super().__init__(net, optimizer, scheduler, init, loss, metrics)

    def sums_of(self, names: list[str]) -> tuple[list[str], tuple[str, ...]]:
        rooted = "rmse" in names
        sums = [name for name in names if name != "rmse"]
        return ([*sums, "mse"] if rooted and "mse" not in sums else sums), (("rmse",) if rooted else ())

    def dummy_targets(self, rows: int, width: int) -> Tensor:
        return torch.linspace(-1, 1, rows * width).view(rows, width).squeeze(1)

    def cast_for_loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return outputs in the shape of the targets, in float32 at least."""
        outputs = super().cast_for_loss(outputs, targets)
        if outputs.shape != targets.shape:
            if outputs.dim() != targets.dim() + 1 or outputs.shape != (*targets.shape, 1):
                raise UserError(
                    f"The net returns {list(outputs.shape)} for targets {list(targets.shape)}: expected equal shapes."
                )
            outputs = outputs.squeeze(-1)
        return outputs

    def losses(self, outputs: Tensor, batch: Any) -> dict[str, Tensor]:
        if self._loss is not None:
            return self.own_losses(outputs, batch[1])
        outputs = self.cast_for_loss(outputs, batch[1])
        return {"mse": F.mse_loss(outputs, batch[1].to(outputs.dtype))}

    def reduce(self, outputs: Tensor, batch: Any, loss: Tensor) -> Tensor:
        error = self.cast_for_loss(outputs.detach(), batch[1]) - batch[1]
        rows = error.reshape(len(error), -1)
        sums = {"mae": lambda: rows.abs().mean(dim=1).sum(), "mse": lambda: rows.square().mean(dim=1).sum()}
        return stacked(loss, [sums[name]() for name in self.metrics[1:]], len(rows))

    def compute(self, means: dict[str, float]) -> dict[str, float]:
        """Return the root of the mean squared error."""
        return {"rmse": math.sqrt(means["mse"])} if "rmse" in self.computed else {}

    def scored(self, outputs: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
        outputs = self.cast_for_loss(outputs, batch[1])
        return outputs, batch[1].to(outputs.dtype)
