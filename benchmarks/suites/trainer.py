"""suite=trainer: the cost of a training step around the net, relative to a hand-written loop.

All sides train the same net on the same batches. Lathe's final weights must be bit-equal to the hand-written loop's,
except the compiled step's, which sums in another order. Times are CPU time of this process in the training epochs after
the first, which includes compilation.
"""

import logging
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.nn import functional as F
from torchmetrics.classification import MulticlassAccuracy

from lathe.callbacks import skip_empty_hooks
from lathe.config.resolve import resolve
from lathe.files import scratch
from lathe.launch.api import compose
from lathe.measure import plot
from lathe.runs.build import make_task
from lathe.training.trainer_setup import make_callbacks, make_loggers, make_trainer, prepare_model
from suites.results import Columns, Facts, Results, Spread, Threshold, show
from suites.runner import report, take_turns

EPOCHS = 3  # timed
WIDTH, PIXELS, CLASSES, LR = 128, 8, 10, 0.01
# The default command, without validation.
DEFAULT = (
    f"data=synthetic data.image_size={PIXELS} data.num_classes={CLASSES} trainer.accelerator=cpu "
    f"trainer.max_epochs={1 + EPOCHS} trainer.limit_val_batches=0 trainer.enable_model_summary=false "
    "callbacks.checkpoint.monitor=null callbacks.progress_bar.plain=false"
).split()
# The same net and optimizer as the hand-written loop's.
OWN = (
    f"model=mlp model.net.width={WIDTH} model.net.depth=2 optimizer.lr={LR} optimizer.nesterov=false "
    "optimizer.weight_decay=0 scheduler=constant"
).split()
HAND, FULL, SINGLE = "hand-written loop", "Lathe, full features", "Lathe, steps_per_call=1"
COMPILED = "Lathe, compile.scope=step"
LIMITS = {FULL: 1.10, COMPILED: 0.80}
Trained = tuple[float, nn.Module]  # CPU seconds of the timed epochs, and the net


class Batches:
    """The same batches in every epoch; Lightning would take a plain list for a list of loaders."""

    def __init__(self, steps: int, size: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.batches = []
        for _ in range(steps):
            x = torch.randn(size, 1, PIXELS, PIXELS, generator=generator)
            self.batches.append((x, torch.randint(0, CLASSES, (size,), generator=generator)))

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return iter(self.batches)


def _make_net() -> nn.Module:
    torch.manual_seed(0)
    hidden = (nn.Linear(PIXELS**2, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU())
    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(WIDTH, CLASSES))


def _make_optimizer(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=LR, momentum=0.9)


class _Clock(Callback):
    """CPU seconds from the start of the second training epoch to the end of the last."""

    def skippable_steps(self, trainer: Trainer) -> float:
        return float("inf")

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.current_epoch == 1:
            self.begin = time.process_time()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.seconds = time.process_time() - self.begin


class _Bare(LightningModule):
    """The least that Lightning needs."""

    def __init__(self) -> None:
        super().__init__()
        self.net = _make_net()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return _make_optimizer(self.net)


class Usual(_Bare):
    """The style of most templates: a metric object and `self.log` at every step."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = MulticlassAccuracy(CLASSES)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        outputs = self.net(batch[0])
        loss = F.cross_entropy(outputs, batch[1])
        self.accuracy(outputs, batch[1])
        self.log("train/loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("train/accuracy", self.accuracy, on_step=True, on_epoch=True, prog_bar=True)
        return loss


# The overrides of that module, as for a user's module.
MODULE = ("model=lightning", f"model.net={{_target_: {Usual.__module__}.{Usual.__name__}}}")


def by_hand(batches: Batches, folder: Path | None = None) -> Trained:
    """Train in a loop of four lines."""
    net = _make_net()
    optimizer = _make_optimizer(net)
    begin = 0.0
    for epoch in range(1 + EPOCHS):
        if epoch == 1:
            begin = time.process_time()
        for x, y in batches:
            optimizer.zero_grad()
            F.cross_entropy(net(x), y).backward()
            optimizer.step()
    return time.process_time() - begin, net


def _by_lightning(module: type[_Bare], batches: Batches, folder: Path) -> Trained:
    """Train with Lightning's Trainer: the bare module without any feature, `Usual` with the usual ones."""
    clock, task = _Clock(), module()
    options: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    if module is Usual:
        options = {"logger": CSVLogger(str(folder / "usual")), "log_every_n_steps": 10}
    options |= {"accelerator": "cpu", "devices": 1, "enable_model_summary": False, "default_root_dir": str(folder)}
    trainer = Trainer(max_epochs=1 + EPOCHS, callbacks=[clock], plugins=[LightningEnvironment()], **options)
    trainer.fit(task, batches)
    return clock.seconds, task.net


def _by_lathe(batches: Batches, folder: Path, overrides: Sequence[str] = (), net: Sequence[str] = OWN) -> Trained:
    """Train with the callbacks and loggers of a run, around the net that all sides train."""
    cfg = resolve(compose([*DEFAULT, *net, *overrides]))
    cfg["paths"]["data_dir"] = str(folder.parent / "compiled")  # keeps compiled code for the next round
    task, clock = make_task(cfg), _Clock()
    if net is OWN:
        task.net = _make_net()
    callbacks = [clock, *make_callbacks(cfg, task)]
    skip_empty_hooks(callbacks)
    trainer = make_trainer(cfg, folder, callbacks, make_loggers(cfg, folder, 0))
    prepare_model(cfg, task, trainer)
    trainer.fit(task.driven, batches)
    return clock.seconds, task.net if net is OWN else task.net.net


SIDES: dict[str, Callable[[Batches, Path], Trained]] = {
    HAND: by_hand,
    "bare Trainer": partial(_by_lightning, _Bare),
    "usual metric + self.log": partial(_by_lightning, Usual),
    FULL: _by_lathe,
    "Lathe, the usual module": partial(_by_lathe, net=MODULE),
    SINGLE: partial(_by_lathe, overrides=("trainer.steps_per_call=1",)),
    COMPILED: partial(_by_lathe, overrides=("compile=default", "compile.scope=step")),
}


def measure(request: Mapping[str, Any], output: Path) -> tuple[Facts, Results]:
    """Measure the time of a step of each side in each round, and compare the weights with the loop's."""
    batches = Batches(request["steps"], request["batch_size"])
    expected = by_hand(batches)[1].state_dict()
    with scratch() as root:

        def turn(side: Callable[[Batches, Path], Trained]) -> dict[str, Any]:
            with scratch(root) as folder, _silent():
                seconds, net = side(batches, folder)
            equal = all(torch.equal(expected[key], value) for key, value in net.state_dict().items())
            return {"us_per_step": seconds / (EPOCHS * len(batches)) * 1e6, "bit_equal": equal}

        sides = {name: partial(turn, side) for name, side in SIDES.items()}
        report("warming up")
        take_turns(sides, 1, quiet=True)
        results = take_turns(sides, request["rounds"])
    return {name: {"updates": (1 + EPOCHS) * len(batches)} for name in sides}, results


def tables(facts: Facts, results: Results, request: Mapping[str, Any]) -> tuple[list[str], str]:
    """Return a row for each side."""

    def cost(name: str) -> float:
        return Spread([result["us_per_step"] for result in results[name]]).median

    columns: Columns = {
        "side": str,
        "CPU time of a step, us": lambda name: f"{cost(name):,.0f}",
        "samples a CPU second": lambda name: f"{request['batch_size'] / cost(name) * 1e6:,.0f}",
        "over the hand-written loop": lambda name: show(results.ratio(name, HAND, "us_per_step")),
        "its weights, bit by bit": lambda name: "yes" if all(r["bit_equal"] for r in results[name]) else "no",
    }
    note = (
        f"CPU time of the training process in {EPOCHS} epochs of {request['steps']} steps after one that is not timed "
        f"({next(iter(facts.values()))['updates']} updates), batches of {request['batch_size']}; each epoch of Lathe's "
        "sides ends with a checkpoint, and loggers get a line every 10 steps.\n"
    )
    drawing = plot.stacks("CPU time of a training step", "us", results.medians("step, us", "us_per_step"))
    return [results.table(columns), note], drawing


def claims(results: Results) -> list[Threshold]:
    """Return the limits of the full features and the compiled step, and the equality of weights."""
    limits = [
        Threshold(
            f"{name}: step over the hand-written loop's,", results.ratio(name, HAND, "us_per_step"), at_most=limit
        )
        for name, limit in LIMITS.items()
    ]
    for name in (FULL, SINGLE):
        equal = results.spread(name, lambda result: float(result["bit_equal"]))
        sentence = f"{name}: weights bit-equal to the hand-written loop's (1 is yes),"
        limits.append(Threshold(sentence, equal and Spread([equal.low]), at_least=1.0))
    return limits


@contextmanager
def _silent() -> Iterator[None]:
    """Discard the output, such as progress bars, which must be drawn because their cost counts."""
    logger = logging.getLogger("lightning.pytorch")
    level = logger.level
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            logger.setLevel(level)
