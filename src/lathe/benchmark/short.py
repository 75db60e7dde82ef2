"""The peak memory of a case, and the metric after a short training."""

import math
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch.optim import Optimizer

from lathe.benchmark.fits import fit
from lathe.callbacks.module_access import task_of
from lathe.measure import PeakMemory
from lathe.measure.processes import everyones
from lathe.training.trainer_setup import device_type

STEPS = 2  # the second has the optimizer's state


def peak(cfg: dict[str, Any]) -> int | None:
    """Return the largest process's peak bytes of tensors in a fit; None for compiled code on a CPU."""
    device = torch.device(device_type(cfg["trainer"]["accelerator"]))
    if cfg["compile"]["enabled"] and device.type != "cuda":
        return None
    cfg = {**cfg, "trainer": {**cfg["trainer"], "max_steps": STEPS}}
    with PeakMemory(device) as memory:  # from before the net is made, so that it counts everything
        memory.reset()
        before = memory.bytes
        fit(cfg, [])
        own = memory.peak - before
    return max(everyones(own))


def train(cfg: dict[str, Any], epochs: int) -> dict[str, Any]:
    """Train; return the number of updates and the validation metric after `epochs` (None if not finite)."""
    whole = {"max_steps": -1, "max_epochs": epochs, "limit_val_batches": 1.0, "check_val_every_n_epoch": epochs}
    updates = _Updates()
    trainer, _ = fit({**cfg, "trainer": {**cfg["trainer"], **whole}}, [updates])
    name = task_of(trainer.lightning_module).monitor
    value = trainer.callback_metrics.get(name)
    found = None if value is None or not math.isfinite(value) else float(value)
    return {"updates": updates.count, "metric": name, "reached": found}


class _Updates(Callback):
    """Counts the optimizer's steps: a gradient scaler skips one for infinite gradients."""

    def __init__(self) -> None:
        self._made = 0
        self._counted = False
        self.count = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        optimizer = trainer.optimizers[0] if trainer.optimizers else None
        if isinstance(optimizer, Optimizer):
            self._counted = True
            self._handle = optimizer.register_step_post_hook(self._note)

    def _note(self, *args: Any) -> None:
        self._made += 1

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.count = self._made if self._counted else trainer.global_step  # DeepSpeed's engine is not an Optimizer
        if self._counted:
            self._handle.remove()
