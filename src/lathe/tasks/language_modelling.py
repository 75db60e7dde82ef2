"""Language modelling: cross-entropy of the next token, perplexity and accuracy."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lathe.config.types import Name, SomeNames
from lathe.config.validation import validated
from lathe.data.order import IGNORE
from lathe.errors import UserError
from lathe.nets.init import apply_init
from lathe.tasks.base import Task
from lathe.tasks.metric_sums import stacked

CHUNK = 2**24  # logits whose log-probabilities exist at the same time in evaluation: 64 MiB of float32


def summed_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the sum over all targets that are not -100, in float32 (float64 for float64 logits): a 0-dim tensor.

    Without a gradient, log-probabilities are computed for a part of the targets at a time: with a vocabulary of 50257
    those of a whole batch take more memory than the net.

    Args:
        logits: [..., vocabulary], of any floating type.
        targets: int64 [...].
    """
    logits, targets = logits.flatten(0, -2), targets.flatten()
    # `logits.float()` would keep a second copy of them all until the backward pass.
    dtype = torch.promote_types(logits.dtype, torch.float32)
    needs_grad = torch.is_grad_enabled() and logits.requires_grad
    rows = len(logits) if needs_grad else max(1, CHUNK // logits.shape[-1])
    total = torch.zeros((), dtype=dtype, device=logits.device)
    for part, target in zip(logits.split(rows), targets.split(rows), strict=True):
        log_p = F.log_softmax(part, dim=-1, dtype=dtype)
        total = total + F.nll_loss(log_p, target, ignore_index=IGNORE, reduction="sum")
    return total


class LanguageModellingTask(Task):
    """Cross-entropy of the next token in nats, its accuracy, and perplexity, the exponential of the mean cross-entropy.

    A batch is `(x, y)` or `(x, y, count)`: x int64 [batch, time]; y int64 [batch, time], the token after each of x, or
    -100 where none counts; `count` a 0-dim float tensor, the counted targets of the global batch divided by the number
    of data replicas. The training loss is the sum over counted targets divided by `count`, so that the mean over
    replicas is the mean over the global batch's targets even if replicas have different numbers of them. Without
    `count`, it is divided by the batch's own counted targets. The net returns logits [batch, time, vocabulary].

    Metrics are means over tokens. A perplexity too large for a float is inf.
    """

    metrics = ("loss", "accuracy")
    computed = ("perplexity",)
    monitor = "val/loss"
    unit = "tokens"
    standard_step = True

    @validated
    def __init__(
        self,
        net: nn.Module,
        optimizer: Callable[[nn.Module], Optimizer] | None = None,
        scheduler: Callable[..., LRScheduler] | None = None,
        init: Name | SomeNames | None = None,
    ) -> None:
        super().__init__(net, optimizer, scheduler)
        apply_init(net, init)

    def check_facts(self, facts: Mapping[str, Any]) -> None:
        """Raise UserError for data of images."""
        if "vocab_size" not in facts and "num_classes" in facts:
            raise UserError(
                "task: LanguageModellingTask requires data of tokens, which have vocab_size: choose data such as "
                "data=synthetic_tokens, or task=classification."
            )

    def losses(self, outputs: Tensor, batch: Any) -> dict[str, Tensor]:
        return {"cross_entropy": summed_cross_entropy(outputs, batch[1]) / self._count(batch)}

    def reduce(self, outputs: Tensor, batch: Any, loss: Tensor) -> Tensor:
        correct = (outputs.detach().argmax(dim=-1) == batch[1]).sum()
        # The sums of a batch without counted targets are 0, although its loss was divided by 1.
        return stacked(loss, [correct], batch[2] if len(batch) > 2 else (batch[1] != IGNORE).sum())

    def compute(self, means: dict[str, float]) -> dict[str, float]:
        """Return the perplexity of the mean loss."""
        try:
            return {"perplexity": math.exp(means["loss"])}
        except OverflowError:
            return {"perplexity": math.inf}

    def count_units(self, batch: Any) -> int:
        """Return the positions in the batch, including those that do not count, without waiting for the device."""
        return int(batch[0].numel())

    @staticmethod
    def _count(batch: Any) -> Tensor:
        """Return the divisor of the summed loss: 0-dim, 1 without counted targets, for a loss of 0 instead of NaN."""
        return batch[2] if len(batch) > 2 else (batch[1] != IGNORE).sum().clamp(min=1)
