"""Trainer tax: CPU time per optimizer step of a full-feature run over a hand-written loop, at a net of about 0.2 ms per
step.

    python benchmarks/bench_trainer.py --rounds 7

Sides, run in turns in one process, one thread: the hand-written loop; Lightning's bare Trainer (no logger, bar,
checkpoint or metric); the usual `metric(x)` with `self.log` at every step, a bar and a CSV logger; and Lathe's task
with csv logger, bar, checkpoint, throughput, NaN guard, accuracy and loss: with `trainer.steps_per_call` auto, with 1
(Lightning's own steps), and with `compile.scope=step`. All train the same net on the same batches; Lathe's final
weights must be bit-equal to the hand loop's, but for the compiled step's, which adds up in another order. Times are
process CPU time of training epochs after the first, in which a step is compiled. The bars: 1.10 with auto, 0.80
compiled.
"""

import argparse
import json
import logging
import os
import platform
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.nn import functional as F
from torchmetrics.classification import MulticlassAccuracy

from lathe.callbacks import Checkpoint, ExactResume, NanGuard, Preemption, Progress, Throughput, skip_empty_hooks
from lathe.loggers import CSVLogger
from lathe.strategies import WholeStep
from lathe.tasks import ClassificationTask

EPOCHS, STEPS, BATCH, WIDTH = 3, 400, 64, 128
LR = 0.01


def make_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10))


def make_optimizer(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=LR, momentum=0.9)


class Batches:
    """The same batches in every epoch; Lightning takes a plain list for a list of loaders."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.batches = [
            (torch.randn(BATCH, 64, generator=generator), torch.randint(0, 10, (BATCH,), generator=generator))
            for _ in range(STEPS)
        ]

    def __len__(self) -> int:
        return STEPS

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return iter(self.batches)


class Clock(Callback):
    """CPU seconds from the start of the second training epoch to the end of the last."""

    def quiet_steps(self, trainer: Trainer) -> float:
        return float("inf")

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.current_epoch == 1:
            self.begin = time.process_time()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.seconds = time.process_time() - self.begin


class Bare(LightningModule):
    """The least that Lightning needs."""

    def __init__(self) -> None:
        super().__init__()
        self.net = make_net()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return make_optimizer(self.net)


class Usual(Bare):
    """The style of most templates: a metric object and `self.log` at every step."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = MulticlassAccuracy(10)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        outputs = self.net(batch[0])
        loss = F.cross_entropy(outputs, batch[1])
        self.accuracy(outputs, batch[1])
        self.log("train/loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("train/accuracy", self.accuracy, on_step=True, on_epoch=True, prog_bar=True)
        return loss


def hand(batches: Batches, folder: Path) -> tuple[float, nn.Module]:
    net = make_net()
    optimizer = make_optimizer(net)
    begin = 0.0
    for epoch in range(1 + EPOCHS):
        if epoch == 1:
            begin = time.process_time()
        for x, y in batches:
            optimizer.zero_grad()
            F.cross_entropy(net(x), y).backward()
            optimizer.step()
    return time.process_time() - begin, net


def _fit(module: LightningModule, batches: Batches, per_call: int | None = None, **options: Any) -> float:
    clock = Clock()
    options["callbacks"] = [clock, *options.get("callbacks", [])]
    trainer = Trainer(max_epochs=1 + EPOCHS, accelerator="cpu", devices=1, enable_model_summary=False, **options)
    trainer.fit_loop.epoch_loop.steps_per_call = per_call  # type: ignore[attr-defined]  # read by Lathe's loop alone
    trainer.fit(module, batches)
    return clock.seconds


def bare(batches: Batches, folder: Path) -> tuple[float, nn.Module]:
    module = Bare()
    seconds = _fit(module, batches, logger=False, enable_checkpointing=False, enable_progress_bar=False)
    return seconds, module.net


def usual(batches: Batches, folder: Path) -> tuple[float, nn.Module]:
    from lightning.pytorch.loggers import CSVLogger as LightningCSV

    module = Usual()
    return _fit(
        module, batches, logger=LightningCSV(str(folder / "usual")), default_root_dir=str(folder), log_every_n_steps=10
    ), module.net


def lathe(
    batches: Batches, folder: Path, per_call: int | None = None, compiled: bool = False
) -> tuple[float, nn.Module]:
    module = ClassificationTask(make_net(), optimizer=make_optimizer)
    if compiled:
        vars(module)["whole_step"] = WholeStep(module)
    callbacks = [
        ExactResume(0),
        Progress(plain=False),
        Preemption(),
        Throughput(),
        NanGuard(),
        Checkpoint(monitor=None),
    ]
    skip_empty_hooks(callbacks)
    seconds = _fit(
        module,
        batches,
        per_call,
        logger=CSVLogger(folder / "metrics.csv"),
        callbacks=callbacks,
        default_root_dir=str(folder),
        log_every_n_steps=10,
    )
    return seconds, module.net


SIDES: dict[str, Callable[[Batches, Path], tuple[float, nn.Module]]] = {
    "hand-written loop": hand,
    "bare Trainer": bare,
    "usual metric + self.log": usual,
    "Lathe, full features": lathe,
    "Lathe, steps_per_call=1": partial(lathe, per_call=1),
    "Lathe, compile.scope=step": partial(lathe, compiled=True),
}
BARS = {"Lathe, full features": 1.10, "Lathe, compile.scope=step": 0.80}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="runs of each side (default 7)")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    batches = Batches()
    micros: dict[str, list[float]] = {name: [] for name in SIDES}
    equal = True
    screen, sys.stdout = sys.stdout, open(os.devnull, "w")  # noqa: SIM115 - the bars draw there
    for number in range(options.rounds + 1):
        nets = {}
        for name, side in SIDES.items():
            with tempfile.TemporaryDirectory() as folder:
                seconds, nets[name] = side(batches, Path(folder))
            if number:  # the first round warms up
                micros[name].append(seconds / (EPOCHS * STEPS) * 1e6)
        by_hand = nets["hand-written loop"].state_dict()
        for name in ("Lathe, full features", "Lathe, steps_per_call=1"):
            equal &= all(torch.equal(by_hand[key], value) for key, value in nets[name].state_dict().items())
    sys.stdout = screen
    versions = {package: metadata.version(package) for package in ("torch", "lightning", "torchmetrics")}
    print(f"{platform.machine()}, {os.cpu_count()} cores, one thread, Python {platform.python_version()}, {versions}")
    print(
        f"{'side':26} {'us/step':>8} {'ratio':>7} {'min':>6} {'max':>6}   (medians, n={options.rounds}; "
        f"{EPOCHS * STEPS} steps each)"
    )
    rows = {}
    for name, values in micros.items():
        ratios = [mine / base for mine, base in zip(values, micros["hand-written loop"], strict=True)]
        rows[name] = {
            "us_per_step": statistics.median(values),
            "ratio": statistics.median(ratios),
            "min": min(ratios),
            "max": max(ratios),
        }
        print(
            f"{name:26} {rows[name]['us_per_step']:8.1f} {rows[name]['ratio']:7.2f} {min(ratios):6.2f} "
            f"{max(ratios):6.2f}{f'   (bar {BARS[name]:.2f})' if name in BARS else ''}"
        )
    print(f"Lathe's final weights bit-equal to the hand loop's: {equal}")
    if options.json:
        options.json.write_text(
            json.dumps({"rounds": options.rounds, "versions": versions, "rows": rows, "bit_equal": equal}, indent=2)
            + "\n"
        )


if __name__ == "__main__":
    main()
