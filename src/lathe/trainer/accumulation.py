"""The mean gradient over the samples of an optimizer step, however batches and replicas divide them."""

from collections import deque
from collections.abc import Callable
from statistics import mean
from time import perf_counter
from typing import Any

import torch
from lightning.pytorch.strategies import DeepSpeedStrategy
from lightning.pytorch.utilities.data import _extract_batch_size
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.distributed.tensor import DTensor


class AccumulationWindow:
    """Weights for the losses of the batches of one optimizer step.

    A batch's loss is the mean over its counted samples; the step's gradient has to be the mean over all of them, on
    every replica and in each accumulated batch, also in a short last window. Until the last batch, losses are weighted
    relative to the first one. Before the last backward pass the total is known: the accumulated gradients and the last
    loss are scaled by it. Windows that are even already are scaled by exactly 1. DeepSpeed's engine keeps the
    gradients, so that accumulated batches count equally there.

    Samples are counted as a task counts them for its metrics (`task.step_counts`), else as the length of the batch.
    Nothing here waits for the device.
    """

    def __init__(self, loop: Any, uneven: bool) -> None:
        trainer = loop.trainer
        self.loop, self.trainer, self.module = loop, trainer, trainer.lightning_module
        self.device = trainer.strategy.root_device
        self.dtype = torch.float32 if self.device.type == "mps" else torch.float64
        self.replicas = trainer.world_size if uneven else 1  # 1 also where all have the same count
        self.equal_batches = isinstance(trainer.strategy, DeepSpeedStrategy)
        self.weight = self.reference = torch.ones((), dtype=self.dtype, device=self.device)
        self.count: Tensor | None = None  # samples of the window so far
        self._waits: deque[Callable[[], float]] = deque(maxlen=64)  # of the newest sums over replicas
        if hasattr(self.module, "step_counts"):
            self.module.step_counts = []

    @classmethod
    def create(cls, loop: Any) -> "AccumulationWindow | None":
        """Return None where each step is one batch of equal size on all replicas."""
        trainer = loop.trainer
        several, uneven = trainer.accumulate_grad_batches > 1, not getattr(trainer.train_dataloader, "even", False)
        if several and uneven and isinstance(trainer.strategy, DeepSpeedStrategy):
            rank_zero_warn(
                "strategy=deepspeed: accumulated batches count equally. Use strategy=fsdp if they are uneven."
            )
        uneven = uneven and trainer.world_size > 1
        return cls(loop, uneven) if several or uneven else None

    def weigh(self, loss: Tensor | None, batch: Any) -> Tensor | None:
        """Return the batch's part of the step's loss, right before its backward pass.

        Args:
            loss: divided by `trainer.accumulate_grad_batches`; None if the batch does not count.
            batch: whose samples are counted.
        """
        accumulate, done = self.trainer.accumulate_grad_batches, self.loop.batch_progress.current.ready - 1
        count = self._count(batch) if loss is not None else torch.zeros_like(self.weight)
        earlier = None if self.equal_batches or done % accumulate == 0 else self.count
        last = self.equal_batches or accumulate == 1 or not self.loop._should_accumulate()
        if earlier is None:
            self.reference = _positive(count if last else self._sum_over_replicas(count) / self.replicas)
        self.count = count if earlier is None else earlier + count
        self.weight = count / self.reference
        if last:
            total = _positive(self._sum_over_replicas(self.count))
            if self.equal_batches:
                accumulate /= min(accumulate, self.trainer.num_training_batches - done // accumulate * accumulate)
            scale = accumulate * self.reference * self.replicas / total
            self.weight = self.weight * scale
            if earlier is not None:
                self._scale_gradients(scale)
            self.count = None
        return None if loss is None else loss * self.weight.to(loss.device, loss.dtype)

    def _count(self, batch: Any) -> Tensor:
        counts = getattr(self.module, "step_counts", None)
        if counts:
            count: Tensor = torch.stack(counts).sum(dtype=self.dtype)
            counts.clear()
            return count
        try:
            lengths = {length for length in _extract_batch_size(batch) if length is not None}
        except RecursionError:
            lengths = set()
        # where tensors differ in length, batches count equally
        return torch.full_like(self.weight, lengths.pop() if len(lengths) == 1 else 1)

    def mean_wait(self) -> float:
        """Return the mean seconds since the last call that a sum over replicas took, mostly waiting for a slower rank.

        DDP's timers count them as computation of backward. On a GPU, the caller has synchronised it.
        """
        waits = [seconds() for seconds in self._waits]
        self._waits.clear()
        return mean(waits) if waits else 0.0

    def _sum_over_replicas(self, count: Tensor) -> Tensor:
        if self.replicas == 1:
            return count
        count = count.clone()
        if count.is_cuda:
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            torch.distributed.all_reduce(count)
            end.record()
            self._waits.append(lambda: begin.elapsed_time(end) / 1e3)
        else:
            started = perf_counter()
            torch.distributed.all_reduce(count)
            seconds = perf_counter() - started
            self._waits.append(lambda: seconds)
        return count

    @torch.no_grad()
    def _scale_gradients(self, scale: Tensor) -> None:
        by_device: dict[torch.device, list[Tensor]] = {}
        for group in self.trainer.optimizers[0].param_groups:
            for parameter in group["params"]:
                if (gradient := parameter.grad) is not None:
                    local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
                    by_device.setdefault(local.device, []).append(local)
        for device, gradients in by_device.items():
            torch._foreach_mul_(gradients, scale.to(device))


def _positive(count: Tensor) -> Tensor:
    return count.clamp(min=1e-6)  # a window without a counted sample has gradient 0
