"""The learning-rate range test: the rate rises from step to step, and the loss says which rates train.

Smith 2017, arXiv:1506.01186. Lightning's own finder gives every parameter group the same rate; here the groups keep
their proportions (roles, layer_decay), and the steps are those of a run: its strategy, precision, clipping and
accumulated batches.
"""

import csv
import io
import json
import math
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.optim import Optimizer

from lathe import files
from lathe.callbacks import FrozenStatistics
from lathe.errors import require
from lathe.measure.plot import lines
from lathe.runs.build import make_data, make_task
from lathe.runs.trainer import make_trainer, quiet, widen
from lathe.tasks import Task
from lathe.verbs.pretrained import take_pretrained
from lathe.verbs.train import check_loaders, prepare, start_from

# What a test of a few steps leaves out of a run.
WITHOUT = {
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "limit_val_batches": 0,
    "num_sanity_val_steps": 0,
    "max_epochs": -1,
    "min_epochs": None,
    "min_steps": None,
    "max_time": None,
    "fast_dev_run": False,
}


def lr_find(cfg: dict[str, Any]) -> dict[str, Any] | None:
    """Trains `find.steps` optimizer steps with a rising rate, prints what it found, and writes it where `find.output`
    says; returns it.

    Raises:
        UserError: a part can't be built, or the test says nothing.
    """
    quiet()
    find = cfg["find"]
    ordered = (
        f"find.min_lr={find['min_lr']:g} is not below find.max_lr={find['max_lr']:g}: the rate rises from the first."
    )
    require(find["min_lr"] < find["max_lr"], ordered)
    seed_everything(cfg["seed"], workers=True, verbose=False)
    cfg = {**cfg, "scheduler": None, "trainer": {**cfg["trainer"], **WITHOUT, "max_steps": find["steps"]}}
    datamodule, task = make_data(cfg), make_task(cfg)
    require(task.automatic_optimization, "find: this task steps its optimizers itself, so no rate can be set for it.")
    task.check_run(cfg)
    check_loaders(cfg, datamodule)
    widen(task, cfg)
    rising = Rising(cfg["optimizer"]["lr"], find["min_lr"], find["max_lr"], find["steps"], find["stop"])
    frozen = [FrozenStatistics()] if cfg.get("freeze") else []
    trainer = make_trainer(cfg, Path(find["output"]).parent, [*task.own_callbacks(), *frozen, rising])
    begin_with(cfg, task)
    prepare(cfg, task, trainer)
    trainer.fit(task.driven, datamodule=datamodule)
    if not trainer.is_global_zero:
        return None
    found = judged(rising.rates, rising.losses)
    write(Path(find["output"]), found)
    show(found, cfg, find)
    return found


def begin_with(cfg: dict[str, Any], task: Task) -> None:
    """Gives the net the weights that the run would begin with."""
    if cfg["ckpt_path"] is not None:
        start_from(cfg, task)
    elif cfg["model"].get("pretrained"):
        take_pretrained(task.net, cfg["model"])


class Rising(Callback):
    """Sets the rate of each optimizer step, from `low` to `high` by equal ratios, and notes the loss that the step was
    made of; ends the run when the loss is `stop` times the lowest.

    `base` is the configured rate, to which each parameter group keeps its proportion.
    """

    def __init__(self, base: float, low: float, high: float, steps: int, stop: float) -> None:
        self.base, self.low, self.ratio, self.stop = base, low, (high / low) ** (1 / max(1, steps - 1)), stop
        self.rates: list[float] = []
        self.losses: list[float] = []
        self._shares: list[float] = []
        self._parts: list[Tensor] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._shares = [group["lr"] / self.base for optimizer in trainer.optimizers for group in optimizer.param_groups]

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        rate = self.low * self.ratio**trainer.global_step
        self.rates.append(rate)
        for group, share in zip(optimizer.param_groups, self._shares, strict=True):
            group["lr"] = rate * share

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._parts.append(outputs["loss"].detach())
        if trainer.global_step == len(self.losses):
            return  # the step has more batches to come
        mine = sum(self._parts[1:], self._parts[0]) / len(self._parts) * trainer.accumulate_grad_batches
        self._parts = []
        self.losses.append(float(trainer.strategy.reduce(mine, reduce_op="mean")))
        newest = smoothed(self.losses)[-1]
        if not math.isfinite(newest) or newest > self.stop * min(smoothed(self.losses)):
            trainer.should_stop = True


def smoothed(losses: list[float], keep: float = 0.9) -> list[float]:
    """The exponential average, without its bias towards zero."""
    found, average = [], 0.0
    for count, loss in enumerate(losses, 1):
        average = keep * average + (1 - keep) * loss
        found.append(average / (1 - keep**count))
    return found


def judged(rates: list[float], losses: list[float]) -> dict[str, Any]:
    """What a range test says: `steepest`, the rate at which the smoothed loss falls fastest for each decade of rates,
    which is the suggestion; `lowest`, where it is lowest; `diverged`, where half of its fall is undone, or None.

    Raises:
        UserError: the loss never fell.
    """
    count = min(len(rates), len(losses))
    smooth = smoothed(losses)[:count]
    finite = [loss for loss in smooth if math.isfinite(loss)]
    low = smooth.index(min(finite)) if finite else 0
    require(
        low > 2 and smooth[low] < 0.98 * smooth[0],
        f"find.min_lr={rates[0]:g}, find.max_lr={rates[-1]:g}: the loss falls at none of these {count} rates, so none "
        "is suggested: lower find.min_lr, raise find.steps, or look whether the net learns at all.",
    )
    width = max(1, count // 50)
    slopes = {
        at: (smooth[min(at + width, low)] - smooth[max(at - width, 0)])
        / (math.log10(rates[min(at + width, low)]) - math.log10(rates[max(at - width, 0)]))
        for at in range(width, low)
    }
    steepest = min(slopes, key=lambda at: slopes[at]) if slopes else low
    undone = (smooth[0] + smooth[low]) / 2
    beyond = next((rate for rate, loss in zip(rates[low:], smooth[low:], strict=False) if not loss <= undone), None)
    return {
        "suggestion": _rounded(rates[steepest]),
        "steepest": rates[steepest],
        "lowest": rates[low],
        "diverged": beyond,
        "rates": rates[:count],
        "losses": losses[:count],
        "smoothed": smooth,
    }


def _rounded(rate: float) -> float:
    """To two digits: more is noise."""
    return float(f"{rate:.1e}")


def write(folder: Path, found: dict[str, Any]) -> None:
    """lr_find.csv, lr_find.svg and lr_find.json."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["lr", "loss", "smoothed"])
    rows = list(zip(found["rates"], found["losses"], found["smoothed"], strict=True))
    writer.writerows(rows)
    folder.mkdir(parents=True, exist_ok=True)
    files.write_atomically(folder / "lr_find.csv", text.getvalue())
    shown = [(math.log10(rate), loss, smooth) for rate, loss, smooth in rows if loss <= 2 * rows[0][1]]
    series = {
        "loss": [(rate, loss) for rate, loss, _ in shown],
        "smoothed": [(rate, smooth) for rate, _, smooth in shown],
    }
    plot = lines("Learning-rate range test", "log10 of the learning rate", "training loss", series)
    files.write_atomically(folder / "lr_find.svg", plot)
    kept = {key: found[key] for key in ("suggestion", "steepest", "lowest", "diverged")}
    files.write_atomically(folder / "lr_find.json", json.dumps(kept, indent=2) + "\n")


def show(found: dict[str, Any], cfg: dict[str, Any], find: dict[str, Any]) -> None:
    """Prints what was found and what to type."""
    beyond = found["diverged"]
    grew = "half of its fall is " + (
        f"undone at {beyond:.2g}" if beyond is not None else f"not undone up to {found['rates'][-1]:.2g}"
    )
    rates, steepest, lowest = found["rates"], found["steepest"], found["lowest"]
    print(f"{len(rates)} optimizer steps: the loss falls fastest at {steepest:.2g}, is lowest at {lowest:.2g}, {grew}.")
    if beyond is None:
        print(f"find.max_lr={find['max_lr']:g} may be too low to see where training breaks: raise it.")
    print(f"Suggestion: optimizer.lr={found['suggestion']:g} (now {cfg['optimizer']['lr']:g}).")
    print(f"{find['output']}: lr_find.svg, lr_find.csv, lr_find.json; nothing else was written or changed.")
