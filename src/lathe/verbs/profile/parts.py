"""Time the parts of a training step without a profiler: data, forward, loss, backward, optimizer."""

import time
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch import nn

WHOLE = "compiled step"
ORDER = ("data", "loop", "forward", "loss", "forward and loss", "backward", "optimizer", WHOLE)


class Clock:
    """A stopwatch that synchronizes with the GPU."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.last = device, 0.0
        self.take()

    def take(self) -> float:
        """Return the seconds since the last call."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        now = time.perf_counter()
        passed, self.last = now - self.last, now
        return passed


class Parts(Callback):
    """Time each part of `steps` optimizer steps, after `warmup` steps.

    The time after a step counts as the next step's data: fetching and moving a batch, and the loop. The forward pass
    and the loss of a compiled net or of a user's LightningModule are timed as one part.
    """

    skippable_steps = None  # needs every step

    def __init__(self, net: nn.Module, warmup: int, steps: int, divides: bool) -> None:
        self.net, self.warmup, self.steps, self.divides = net, warmup, steps, divides
        self.found: list[dict[str, float]] = []
        self._now: dict[str, float] = {}
        self._clock: Clock | None = None
        self._handles: list[Any] = []
        self._steps = 0
        self._lost = False  # whether the batch's loss has been computed

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._clock = Clock(trainer.strategy.root_device)
        if self.divides:
            self._handles = [
                self.net.register_forward_pre_hook(lambda *_: self._mark("loop")),
                self.net.register_forward_hook(lambda *_: self._mark("forward")),
            ]

    def _mark(self, part: str) -> None:
        if self._clock is not None:
            self._now[part] = self._now.get(part, 0.0) + self._clock.take()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._mark("data")
        self._lost = False

    def on_before_zero_grad(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        self._mark("loss" if self.divides else "forward and loss")
        self._lost = True

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Any) -> None:
        # an accumulated batch has no zero_grad
        self._mark("optimizer" if self._lost else "loss" if self.divides else "forward and loss")

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._mark("backward")

    def on_whole_step(self, trainer: Trainer, pl_module: LightningModule, loss: Any) -> None:
        """Time a step that is one compiled function."""
        self._mark(WHOLE)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._mark("loop" if WHOLE in self._now else "optimizer")
        if trainer.global_step == self._steps:
            return  # gradients are being accumulated
        self._steps = trainer.global_step
        self.found.append(self._now)
        self._now = {}
        if len(self.found) >= self.warmup + self.steps:
            self._close()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._close()

    def _close(self) -> None:
        self._clock = None
        for handle in self._handles:
            handle.remove()

    def medians(self) -> dict[str, float]:
        """Return the milliseconds of each part, and of the whole `step`."""
        return medians(self.found[self.warmup : self.warmup + self.steps])


def medians(found: list[dict[str, float]]) -> dict[str, float]:
    """Return the milliseconds of each part, in order, and of the whole `step`, of the median step.

    Medians of each part would not add up to a step.
    """
    times = sorted(found, key=lambda step: sum(step.values()))[(len(found) - 1) // 2]
    parts = {part: 1e3 * times[part] for part in sorted(times, key=ORDER.index)}
    return {**parts, "step": sum(parts.values())}
