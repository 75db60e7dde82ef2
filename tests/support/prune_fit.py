"""A small net trained for 24 steps under pruning, and a callback that records it."""

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn

from lathe.compression.pruning.callback import Prune
from lathe.trainer import Trainer
from support.quiet import Batches, quiet_trainer


class Loader(Batches):
    """This process's half of each of six batches `(x [8, 4], y [8])`."""

    def __init__(self, rank: int = 0, world: int = 1) -> None:
        generator = torch.Generator().manual_seed(1)
        x, y = torch.randn(6, 8, 4, generator=generator), torch.randint(0, 3, (6, 8), generator=generator)
        super().__init__([(a[rank::world], b[rank::world]) for a, b in zip(x, y, strict=True)])


class Task(LightningModule):
    """A task with the net's names in checkpoints, as in Lathe; the loss is the mean over the whole batch."""

    def __init__(self, net: nn.Module | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = net or nn.Sequential(
            nn.Linear(4, 10), nn.ReLU(), nn.Dropout(0.1), nn.Linear(10, 8), nn.ReLU(), nn.Linear(8, 3)
        )

    def configure_model(self) -> None:
        shard = getattr(self.trainer.strategy, "shard", None)
        if shard is not None:
            shard(self)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.net(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.net.parameters(), lr=0.02, weight_decay=0.1)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"] = {k.removeprefix("net."): v for k, v in checkpoint["state_dict"].items()}
        checkpoint["random"] = torch.get_rng_state()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"] = {f"net.{k}": v for k, v in checkpoint["state_dict"].items()}
        self.random = checkpoint["random"]

    def on_train_start(self) -> None:
        if hasattr(self, "random"):
            torch.set_rng_state(self.random)


class Watch(Callback):
    """Records the number of zeros and the method's readiness after each step; saves checkpoints after some."""

    def __init__(self, prune: Prune, folder: Path | None = None, *steps: int) -> None:
        self.prune, self.folder, self.steps = prune, folder, steps
        self.zeros: dict[int, int] = {}
        self.ready: list[int] = []
        self.seen: dict[int, dict[str, Tensor]] = {}

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *args: Any) -> None:
        step = trainer.global_step
        weights = {n: p.full_tensor() if hasattr(p, "full_tensor") else p for n, p in pl_module.net.named_parameters()}
        self.seen[step] = {name: weight.detach().clone() for name, weight in weights.items()}
        self.zeros[step] = sum(int((weights[name] == 0).sum()) for name in ("0.weight", "3.weight") if name in weights)
        if self.prune.ready(trainer):
            self.ready.append(step)
        if step in self.steps:
            trainer.save_checkpoint(f"{self.folder}/step={step}.ckpt")


def fit(
    *callbacks: Callback,
    task: Task | None = None,
    resume: str | None = None,
    steps: int = 24,
    rank: int = 0,
    strategy: Any = "auto",
    **options: Any,
) -> Task:
    task, world = task or Task(), 1 if strategy == "auto" else 2
    trainer = quiet_trainer(
        *callbacks,
        devices=world,
        strategy=strategy,
        max_epochs=4,
        max_steps=steps,
        num_sanity_val_steps=1,
        **options,
    )
    trainer.fit(task, Loader(rank, world), Loader(), ckpt_path=resume, weights_only=True)
    return task


WEIGHTS = 4 * 10 + 10 * 8
