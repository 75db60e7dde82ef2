"""The learning-rate range test (Smith 2017, arXiv:1506.01186).

Unlike in Lightning's finder, parameter groups keep their ratios (roles, layer_decay), and the steps are those of a run:
its strategy, precision, clipping and accumulated batches.
"""

import inspect
import json
import math
import re
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.optim import Optimizer

from lathe import files
from lathe.errors import require
from lathe.measure.plot import lines
from lathe.training.dry_run import DryRun, learning_rates

_RATE = re.compile(r"(.*_)?(lr|learning_rate)")  # names of a module's learning-rate argument


def lr_find(cfg: dict[str, Any]) -> dict[str, Any] | None:
    """Train `find.steps` optimizer steps with a rising rate; print, write and return the result."""
    find = cfg["find"]
    low, high = find["min_lr"], find["max_lr"]
    require(low < high, f"find.min_lr={low:g} is not below find.max_lr={high:g}: the rate rises from the first.")
    trial = DryRun(cfg)
    module = trial.task.driven
    require(
        module.automatic_optimization,
        f"{type(module).__name__} steps its optimizers itself (automatic_optimization=False), so no rate can be set "
        "for it: try some in short runs.",
    )
    rising = Rising(cfg["optimizer"].get("lr"), low, high, find["steps"], find["stop"])
    trainer = trial.fit(rising)
    if not trainer.is_global_zero:
        return None
    result = suggest(rising.rates, rising.losses)
    rows = list(zip(result["rates"], result["losses"], result["smoothed"], strict=True))
    shown = [row for row in rows if row[1] <= 2 * rows[0][1]]
    series = {name: [(row[0], row[at]) for row in shown] for at, name in ((1, "loss"), (2, "smoothed"))}
    marks = {f"suggested: {result['suggestion']:g}": result["suggestion"]}
    title, x_name = "Learning-rate range test", "learning rate (log scale)"
    summary = {key: result[key] for key in ("suggestion", "steepest", "lowest", "diverged")}
    texts = {
        "lr_find.csv": files.csv_text(["lr", "loss", "smoothed"], rows),
        "lr_find.svg": lines(title, x_name, "training loss", series, marks=marks, log_x=True),
        "lr_find.json": json.dumps(summary, indent=2) + "\n",
    }
    folder = Path(find["output"])
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        files.write_atomically(folder / name, text)
    beyond, rates = result["diverged"], result["rates"]
    grew = f"undone at {beyond:.2g}" if beyond else f"not undone up to {rates[-1]:.2g}: raise find.max_lr to see where"
    print(
        f"{len(rates)} optimizer steps: the loss falls fastest at {result['steepest']:.2g}, is lowest at "
        f"{result['lowest']:.2g}, half of its fall is {grew}."
    )
    print(f"Suggestion: {override(cfg, module, rising.base, result['suggestion'])}.")
    print(f"{find['output']}: lr_find.svg, lr_find.csv, lr_find.json; nothing else was written or changed.")
    if len(set(rising.shares)) > 1:
        print("The parameter groups keep their ratios; the rate is that which all follow from.")
    return result


class Rising(Callback):
    """Raise the rate from `low` to `high` by equal ratios, and record the loss of each optimizer step.

    The run ends when the loss is `stop` times the lowest. `base` is the configured rate, to which each parameter group
    keeps its ratio; None is the highest rate of a group. The rate of a group with a scheduler is the one that the
    scheduler starts from or rises to.
    """

    skippable_steps = None  # needs every step

    def __init__(self, base: float | None, low: float, high: float, steps: int, stop: float) -> None:
        self.low, self.ratio, self.stop = low, (high / low) ** (1 / max(1, steps - 1)), stop
        self.base = base or 0.0
        self.rates: list[float] = []
        self.losses: list[float] = []
        self.shares: list[float] = []  # of the rate, by parameter group
        self._parts: list[Tensor] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        own = [rate for optimizer in trainer.optimizers for rate in learning_rates(optimizer)]
        require(bool(own), f"{type(pl_module).__name__} has no optimizer with a rate.")
        self.base = self.base or max(own)
        self.shares = [rate / self.base for rate in own]

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        rate = self.low * self.ratio**trainer.global_step
        if len(self.rates) == trainer.global_step:  # LBFGS calls this several times a step
            self.rates.append(rate)
        for group, share in zip(optimizer.param_groups, self.shares, strict=True):
            group["lr"] = torch.full_like(group["lr"], rate * share) if torch.is_tensor(group["lr"]) else rate * share

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        require(
            bool(outputs) and "loss" in outputs,
            f"{type(pl_module).__name__}.training_step returned no loss for batch {batch_idx}: a range test reads the "
            "loss of every step, so let it return one.",
        )
        self._parts.append(outputs["loss"].detach())
        if trainer.global_step == len(self.losses):
            return  # the step accumulates more batches
        mine = sum(self._parts[1:], self._parts[0]) / len(self._parts) * trainer.accumulate_grad_batches
        self._parts = []
        self.losses.append(float(trainer.strategy.reduce(mine, reduce_op="mean")))
        smooth = smoothed(self.losses)
        if not math.isfinite(smooth[-1]) or smooth[-1] > self.stop * min(smooth):
            trainer.should_stop = True


def smoothed(losses: list[float]) -> list[float]:
    """Return the exponential moving average, with bias correction."""
    averages, average, keep = [], 0.0, 0.9
    for count, loss in enumerate(losses, 1):
        average = keep * average + (1 - keep) * loss
        averages.append(average / (1 - keep**count))
    return averages


def suggest(rates: list[float], losses: list[float]) -> dict[str, Any]:
    """Evaluate a range test; raise UserError if the loss never fell.

    `suggestion` is `steepest` rounded, the rate at which the smoothed loss falls fastest per decade of rates; `lowest`
    the rate of the lowest loss; `diverged` the rate at which half of the fall is undone, or None.
    """
    count = min(len(rates), len(losses))
    smooth = smoothed(losses)[:count]
    finite = [loss for loss in smooth if math.isfinite(loss)]
    low = smooth.index(min(finite)) if finite else 0
    require(
        low > 2 and smooth[low] < 0.98 * smooth[0],
        f"find.min_lr={rates[0]:g}, find.max_lr={rates[-1]:g}: the loss falls at none of these {count} rates: lower "
        "find.min_lr or raise find.steps.",
    )
    width = max(1, count // 50)

    def slope(at: int) -> float:
        a, b = max(at - width, 0), min(at + width, low)
        return (smooth[b] - smooth[a]) / (math.log10(rates[b]) - math.log10(rates[a]))

    steepest = min(range(width, low), key=slope, default=low)
    undone = (smooth[0] + smooth[low]) / 2
    beyond = next((rate for rate, loss in zip(rates[low:], smooth[low:], strict=False) if not loss <= undone), None)
    return {
        "suggestion": float(f"{rates[steepest]:.1e}"),  # more digits are noise
        "steepest": rates[steepest],
        "lowest": rates[low],
        "diverged": beyond,
        "rates": rates[:count],
        "losses": losses[:count],
        "smoothed": smooth,
    }


def override(cfg: dict[str, Any], module: LightningModule, now: float, rate: float) -> str:
    """Return the override that sets this rate, or where a module's own optimizer sets it."""
    if cfg["optimizer"]:
        plus = "" if "lr" in cfg["optimizer"] else "+"
        return f"{plus}optimizer.lr={rate:g} (now {now:g})"
    node, takes = cfg["model"]["net"], inspect.signature(type(module)).parameters
    values = {name: node.get(name, takes[name].default if name in takes else None) for name in {*takes, *node}}
    holds = [name for name, value in values.items() if _RATE.fullmatch(name) and value == now]
    if len(holds) == 1:
        return f"{'' if holds[0] in node else '+'}model.net.{holds[0]}={rate:g} (now {now:g})"
    return (
        f"a rate of {rate:g} (now {now:g}) where {type(module).__name__}.configure_optimizers sets it; as an argument "
        f"lr of its __init__ it would be a key, model.net.lr={rate:g}"
    )
