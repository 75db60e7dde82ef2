"""Moving average of weights."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim.swa_utils import get_ema_multi_avg_fn


class MovingAverage:
    """`average = decay * average + (1 - decay) * weights` (Polyak and Juditsky, 1992), in place.

    With `warmup`, update t uses min(decay, (1 + t) / (10 + t)), as in TensorFlow and timm. The average starts from
    `tensors`, or if empty from the first weights, in at least float32: in low precision small steps vanish.
    """

    def __init__(self, decay: float, warmup: bool = True) -> None:
        self.decay, self.warmup = decay, warmup
        self.updates = 0
        self.tensors: list[Tensor] = []

    @torch.no_grad()
    def update(self, weights: Sequence[Tensor]) -> None:
        """Add weights to the average, in its precision; any precision if `tensors` is empty."""
        if self.tensors:
            decay = min(self.decay, (1 + self.updates) / (10 + self.updates)) if self.warmup else self.decay
            get_ema_multi_avg_fn(decay)(self.tensors, weights, self.updates)
        else:
            self.tensors = [tensor.detach().to(wide(tensor), copy=True) for tensor in weights]
        self.updates += 1


def wide(tensor: Tensor) -> torch.dtype:
    """Return the precision of a tensor's average."""
    return torch.promote_types(tensor.dtype, torch.float32)
