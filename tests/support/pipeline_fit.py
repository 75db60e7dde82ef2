"""A tiny fit, the same for one process and for the ranks of a pipeline."""

import os
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lathe.callbacks import AtomicCheckpointIO, Checkpoint
from lathe.config.parallel_dims import axes
from lathe.nets import GPT, MLP, Blocks, CifarResNet, ViT, timm_net
from lathe.optim import build_optimizer
from lathe.strategies import SyncBatchNorm
from lathe.tasks import ClassificationTask, LanguageModellingTask
from lathe.training.trainer_setup import configure_logging
from support.quiet import quiet_trainer
from support.strategy_fit import TIMM

STEPS = 6
BATCH = 16


class Tied(nn.Module):
    """A net of tokens with tied embeddings, a norm after the blocks and a parameter of the root module."""

    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.shift = nn.Parameter(torch.randn(8))
        self.blocks = Blocks(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(depth))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 10, bias=False)
        self.head.weight = self.embed.weight

    def enter(self, x: Tensor) -> Tensor:
        return self.embed(x) + self.shift

    def leave(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x).mean(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.blocks(self.enter(x)))


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    if name == "mlp":
        return MLP(channels=1, image_size=4, num_classes=10, width=12, depth=6)
    if name == "resnet":
        return CifarResNet(depth=8, width=4, in_channels=1)
    if name == "tied":
        return Tied()
    if name == "gpt":
        return GPT(vocab_size=10, max_length=5, width=8, depth=3, heads=2)
    if name == "gpt4":
        return GPT(vocab_size=10, max_length=6, width=8, depth=4, heads=2)
    if name == "vit":
        return ViT(channels=1, image_size=4, num_classes=10, patch_size=2, width=8, depth=3, heads=2)
    if name in TIMM:
        return timm_net(name, in_channels=1, image_size=32)
    raise KeyError(name)


def data(name: str, size: int = BATCH) -> list[tuple[Tensor, ...]]:
    generator = torch.Generator().manual_seed(1)
    batches = []
    for _ in range(STEPS):
        shape = (size, 6 if name == "gpt4" else 5)
        tokens = torch.randint(10, shape, generator=generator)
        following = torch.where(
            torch.rand(shape, generator=generator) < 0.3, -100, torch.randint(10, shape, generator=generator)
        )
        side = 32 if name in TIMM else 8 if name == "resnet" else 4
        images = torch.randn(size, 1, side, side, generator=generator)
        classes = torch.randint(10, (size,), generator=generator)
        if name.startswith("gpt"):
            batches.append((tokens, following, (following != -100).sum().float()))
        else:
            batches.append((tokens if name == "tied" else images, classes))
    return batches


class Losses(Callback):
    """The loss of every batch, and of every validation epoch."""

    def __init__(self) -> None:
        self.seen: list[float] = []
        self.validated: list[float] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(float(outputs["loss"]))

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self.validated.append(float(trainer.callback_metrics["val/loss"]))


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    return build_optimizer(
        net,
        kind=torch.optim.SGD,
        lr=0.2,
        weight_decay=1e-2,
        no_decay=["norm", "bias"],
        reference_batch_size=1,
        batch_size=1,
        momentum=0.9,
    )


def adam(net: nn.Module) -> torch.optim.Optimizer:
    return build_optimizer(
        net,
        kind=torch.optim.AdamW,
        eps=1e-6,  # Adam would scale the rounding of a gradient near zero up to a step of `lr`
        lr=1e-2,
        weight_decay=1e-2,
        no_decay=["norm", "bias"],
        reference_batch_size=1,
        batch_size=1,
    )


def fit(
    name: str,
    strategy: Any = "auto",
    *,
    folder: Path | None = None,
    resume: Path | None = None,
    epochs: int = 1,
    clip: float | None = 0.5,
    accumulate: int = 2,
    optimizer: Any = sgd,
    callbacks: Any = (),
    plugins: Any = (),
    batches: Any = None,
    net: nn.Module | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Train a net; return losses by batch and by validation, and the checkpoint's name if `folder` is given."""
    configure_logging()
    warnings.filterwarnings("ignore", message=".*num_workers.*")
    task = (LanguageModellingTask if name.startswith("gpt") else ClassificationTask)(
        build(name) if net is None else net, optimizer=optimizer
    )
    losses = Losses()
    kept = [Checkpoint(monitor=None)] if folder is not None else []
    for checkpoint in kept:
        checkpoint._dirpath = folder  # there is no run directory
    several = torch.distributed.is_initialized() and strategy != "auto"
    rows = data(name) if batches is None else batches
    if several:
        rows = [share(row, strategy) for row in rows]
    trainer = quiet_trainer(
        losses,
        *kept,
        *callbacks,
        devices=torch.distributed.get_world_size() if several else 1,
        strategy=strategy,
        max_epochs=epochs,
        enable_checkpointing=bool(kept),
        gradient_clip_val=clip,
        accumulate_grad_batches=accumulate,
        num_sanity_val_steps=0,
        plugins=[AtomicCheckpointIO(), *([SyncBatchNorm()] if several else []), *plugins],
        log_every_n_steps=1,
        **options,
    )
    loader = partial(DataLoader, batch_size=None)
    trainer.fit(task, loader(rows), loader(rows[:2]), ckpt_path=resume, weights_only=True)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return {"losses": losses.seen, "validated": losses.validated, "figures": metrics, "task": task, "trainer": trainer}


def share(batch: tuple[Tensor, ...], strategy: Any) -> tuple[Tensor, ...]:
    """Return the shard of a global batch for this rank's replica."""
    world, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    shape = axes(strategy._sizes, world)
    replica = rank // (shape.stages * shape.tensor)
    return tuple(t.chunk(shape.data)[replica] if t.dim() else t / shape.data for t in batch)


def plain(result: dict[str, Any]) -> dict[str, Any]:
    """Return the picklable results of a rank."""
    return {key: result[key] for key in ("losses", "validated", "figures")}
