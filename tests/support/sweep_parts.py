"""Callbacks that make the job of a certain seed fail."""

import os
import signal
import time
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, Trainer


def seed_of(trainer: Trainer) -> int:
    seed: int = trainer.datamodule.seed  # type: ignore[attr-defined]
    return seed


class Falls(Callback):
    """The run of `seed` fails until a file `mended` exists."""

    def __init__(self, seed: int = 2) -> None:
        self.seed = seed

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
        if seed_of(trainer) == self.seed and not Path("mended").exists():
            raise ValueError("no luck")


class Dies(Callback):
    """Seed 2 is killed once, seed 3 at each start."""

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        first = seed_of(trainer) == 2 and not Path("died").exists()
        if trainer.global_step == 12 and (first or seed_of(trainer) == 3):
            if first:
                Path("died").touch()
            os.kill(os.getpid(), signal.SIGKILL)


class Hangs(Callback):
    """Seed 1 hangs."""

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        time.sleep(600 * (seed_of(trainer) == 1))
