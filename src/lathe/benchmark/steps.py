"""The sides of suite=trainer: one net trained on the same batches, from a hand-written loop to the default command."""

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger as LightningCSV
from omegaconf import OmegaConf
from torch import nn
from torch.nn import functional as F
from torchmetrics.classification import MulticlassAccuracy

from lathe.callbacks import skip_empty_hooks
from lathe.launch.api import compose
from lathe.runs.build import make_task
from lathe.training.callbacks_and_loggers import make_callbacks, make_loggers
from lathe.training.trainer_setup import make_trainer, prepare_model

Trained = tuple[float, nn.Module]  # CPU seconds of the timed epochs, and the net
EPOCHS = 3  # timed
WIDTH, PIXELS, CLASSES, LR = 128, 8, 10, 0.01
# The default command on that net, with the hand-written loop's optimizer.
OWN = (
    "model=mlp",
    f"model.net.width={WIDTH}",
    "model.net.depth=2",
    f"optimizer.lr={LR}",
    "optimizer.nesterov=false",
    "optimizer.weight_decay=0",
    "scheduler=constant",
)
DEFAULT = (
    "data=synthetic",
    f"data.image_size={PIXELS}",
    f"data.num_classes={CLASSES}",
    "trainer.accelerator=cpu",
    f"trainer.max_epochs={1 + EPOCHS}",
    "trainer.limit_val_batches=0",
    "trainer.enable_model_summary=false",
    "callbacks.checkpoint.monitor=null",
    "callbacks.progress_bar.plain=false",
)
HAND, USUAL, FULL, USUAL_HERE, SINGLE, COMPILED = (
    "hand-written loop",
    "usual metric + self.log",
    "Lathe, full features",
    "Lathe, the usual module",
    "Lathe, steps_per_call=1",
    "Lathe, compile.scope=step",
)


class Batches:
    """The same batches in every epoch; Lightning would take a plain list for a list of loaders."""

    def __init__(self, steps: int, size: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.batches = [
            (
                torch.randn(size, 1, PIXELS, PIXELS, generator=generator),
                torch.randint(0, CLASSES, (size,), generator=generator),
            )
            for _ in range(steps)
        ]

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return iter(self.batches)


def _configured(words: Sequence[str], kept: Path) -> dict[str, Any]:
    """Return the default command's configuration on this net, without validation. Compiled code is in `kept`."""
    cfg: Any = OmegaConf.to_container(compose([*DEFAULT, *words]), resolve=True)
    cfg["paths"]["data_dir"] = str(kept)
    return dict(cfg)


def _make_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(PIXELS**2, WIDTH),
        nn.ReLU(),
        nn.Linear(WIDTH, WIDTH),
        nn.ReLU(),
        nn.Linear(WIDTH, CLASSES),
    )


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


# The overrides of the module, as for a user's module.
MODULE = ("model=lightning", f"model.net={{_target_: {Usual.__module__}.{Usual.__name__}}}")


def by_hand(batches: Batches, folder: Path | None = None) -> Trained:
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


def _fit(module: LightningModule, batches: Batches, **options: Any) -> float:
    clock = _Clock()
    trainer = Trainer(
        max_epochs=1 + EPOCHS,
        accelerator="cpu",
        devices=1,
        enable_model_summary=False,
        callbacks=[clock],
        plugins=[LightningEnvironment()],
        **options,
    )
    trainer.fit(module, batches)
    return clock.seconds


def _bare(batches: Batches, folder: Path) -> Trained:
    module = _Bare()
    seconds = _fit(module, batches, logger=False, enable_checkpointing=False, enable_progress_bar=False)
    return seconds, module.net


def _usual(batches: Batches, folder: Path) -> Trained:
    module, logger = Usual(), LightningCSV(str(folder / "usual"))
    return _fit(module, batches, logger=logger, default_root_dir=str(folder), log_every_n_steps=10), module.net


def _lathe(batches: Batches, folder: Path, words: Sequence[str] = (), net: Sequence[str] = OWN) -> Trained:
    """Train with the callbacks and loggers of a run, around the net that all sides train."""
    cfg = _configured([*net, *words], folder.parent / "compiled")
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
    "bare Trainer": _bare,
    USUAL: _usual,
    FULL: _lathe,
    USUAL_HERE: partial(_lathe, net=MODULE),
    SINGLE: partial(_lathe, words=("trainer.steps_per_call=1",)),
    COMPILED: partial(_lathe, words=("compile=default", "compile.scope=step")),
}
