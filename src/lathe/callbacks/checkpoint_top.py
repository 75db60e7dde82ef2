"""Checkpoints of the best epochs, in addition to best.ckpt."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer

from lathe.files import write_atomically

LIST = "top.json"


class Top:
    """The `count` best epochs (-1: all that were judged; 1: only best.ckpt).

    `kept` has names, scores and steps, the best first; of equal ones the later, as for best.ckpt.
    """

    def __init__(self, count: int, mode: str) -> None:
        self.count, self.sign = count, -1.0 if mode == "max" else 1.0
        self.kept: list[dict[str, Any]] = []

    def judge(self, checkpoint: Any, trainer: Trainer, score: float) -> None:
        """Write a checkpoint if the epoch just judged is among the best, then remove the one it replaces.

        A collective. A run resumed from an earlier checkpoint repeats this.
        """
        if self.count == 1 or math.isnan(score):
            return
        name = f"epoch={trainer.current_epoch}-step={trainer.global_step}"
        found = {"name": name, "score": score, "step": trainer.global_step}
        others = [one for one in self.kept if one["name"] != name]
        ranked = sorted([found, *others], key=lambda one: (self.sign * one["score"], -one["step"]))
        count = len(ranked) if self.count < 0 else self.count
        if found not in ranked[:count]:
            return
        checkpoint.save(trainer, name)
        self.kept = ranked[:count]
        drain = getattr(trainer.strategy.checkpoint_io, "drain", None)
        if ranked[count:] and drain is not None:
            drain()  # a thread may still write a file
        trainer.strategy.barrier("top")
        if trainer.is_global_zero:
            folder = checkpoint.path(name).parent
            write_atomically(folder / LIST, json.dumps(self.kept, indent=2) + "\n")
            for one in ranked[count:]:
                _remove(checkpoint.path(one["name"]))


def _remove(path: Path) -> None:
    """Remove a file, or the folder that a sharded strategy wrote and the link to it."""
    folder = path.resolve()
    path.unlink(missing_ok=True)
    if folder != path and folder.is_dir():
        shutil.rmtree(folder, ignore_errors=True)
