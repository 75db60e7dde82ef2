"""Short trainings under a strategy, with clipping and accumulation, to compare ranks with one process."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.warnings import PossibleUserWarning
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lathe.callbacks import AtomicCheckpointIO
from lathe.nets import GPT, MLP, CifarResNet, DeepMLP, ViT, timm_net
from lathe.runs.checkpoints import read_checkpoint
from lathe.strategies import SyncBatchNorm
from lathe.strategies.dtensors import local
from lathe.tasks import ClassificationTask, LanguageModellingTask, Task
from lathe.trainer import Trainer
from support.quiet import quiet_trainer

TIMM = ("resnet10t", "convnext_atto", "vit_tiny_patch16_224")
BATCH, ACCUMULATE, CLIP, MOST = 8, 2, 0.1, 32
NETS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: MLP(width=16, depth=4, channels=1, image_size=4, num_classes=3),
    "deep_mlp": lambda: DeepMLP(width=16, depth=3, channels=1, image_size=4, num_classes=3),
    "resnet": lambda: CifarResNet(depth=8, width=4, in_channels=1, num_classes=3),
    "vit": lambda: ViT(width=16, depth=2, heads=2, patch_size=2, channels=1, image_size=4, num_classes=3),
    "gpt": lambda: GPT(width=16, depth=2, heads=2, vocab_size=12, max_length=6),
    "untied": lambda: GPT(width=16, depth=2, heads=2, vocab_size=12, max_length=6, tie_weights=False),
    **{name: lambda name=name: timm_net(name, in_channels=1, num_classes=3, image_size=32) for name in TIMM},
    "linear": lambda: nn.Sequential(nn.Flatten(), nn.Linear(16, 3)),
}


def adamw(net: nn.Module, **options: Any) -> torch.optim.Optimizer:
    """AdamW with weight decay only on matrices, in two groups, as configured."""
    flat = [p for p in net.parameters() if p.ndim < 2]
    groups = [{"params": [p for p in net.parameters() if p.ndim >= 2]}, {"params": flat, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1, **options)


def batches(name: str, n: int) -> list[tuple[Tensor, Tensor]]:
    """Return the first global batches, at most MOST, the same for every run."""
    generator = torch.Generator().manual_seed(1)
    if name in ("gpt", "untied"):
        tokens = torch.randint(12, (MOST, BATCH, 7), generator=generator)
        return [(row[:, :-1], row[:, 1:]) for row in tokens[:n]]
    side = 32 if name in TIMM else 4
    x = torch.randn(MOST, BATCH, 1, side, side, generator=generator)
    y = torch.randint(3, (MOST, BATCH), generator=generator)
    return list(zip(x[:n], y[:n], strict=True))


class Losses(Callback):
    """Records the loss of each micro-batch on this rank, and the bytes held after the first step."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.held = 0

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *_: Any) -> None:
        self.losses.append(float(outputs["loss"]))
        if trainer.global_step == 1 and not self.held:
            self.held = held_by(pl_module.get_submodule("net"), trainer.optimizers[0])


def held_by(module: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of parameters, buffers and optimizer state on this rank; repeated tensors count once."""
    tensors = [*module.parameters(), *module.buffers()]
    tensors += [value for entry in optimizer.state.values() for value in entry.values() if torch.is_tensor(value)]
    return sum(t.numel() * t.element_size() for t in {id(t): local(t) for t in tensors}.values())


def task_of(name: str, optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adamw) -> Task:
    torch.manual_seed(0)
    net = NETS[name]()
    return LanguageModellingTask(net, optimizer) if name in ("gpt", "untied") else ClassificationTask(net, optimizer)


def fit(
    name: str,
    strategy: Any = "auto",
    *,
    world: int = 1,
    part: tuple[int, int] = (0, 1),
    steps: int = 2,
    begin: int = 0,
    save: Path | None = None,
    resume: Path | None = None,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adamw,
    before: Callable[[nn.Module], None] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Train `steps` optimizer steps on the global batches from step `begin` on; return the losses.

    `part` is this process's shard of each batch (index, count). Optimizer and weights are restored from `resume`, and
    saved to `save`.
    """
    task = task_of(name, optimizer)
    if before is not None:
        before(task.net)
    mine = [
        (x.chunk(part[1])[part[0]], y.chunk(part[1])[part[0]]) for x, y in batches(name, (begin + steps) * ACCUMULATE)
    ]
    losses = Losses()
    plugins = [AtomicCheckpointIO(), *options.pop("plugins", [])]
    trainer = quiet_trainer(
        losses,
        devices=world,
        strategy=strategy,
        max_epochs=2 if resume else 1,
        accumulate_grad_batches=ACCUMULATE,
        gradient_clip_val=options.pop("gradient_clip_val", CLIP),
        plugins=[*plugins, SyncBatchNorm()] if world > 1 else plugins,
        **options,
    )
    loader = DataLoader(mine[begin * ACCUMULATE :], batch_size=None, num_workers=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PossibleUserWarning)  # no validation and few workers, on purpose
        trainer.fit(task, loader, ckpt_path=resume, weights_only=True)
    if save is not None:
        trainer.save_checkpoint(save)
    return {"losses": losses.losses, "held": losses.held}


def like_one_process(ranks: list[dict[str, Any]], path: Path, one_path: Path, name: str, **options: Any) -> None:
    """Compare the results of ranks, and their checkpoint in `path`, with those of a fit in one process."""
    one = fit(name, save=one_path, **options)
    assert len(set(one["losses"])) == 4
    assert relative(mean_losses(ranks), one["losses"]) < 1e-5
    theirs, ours = read_checkpoint(one_path), read_checkpoint(path)
    for key in ("state_dict", "optimizer_states"):
        assert same_format(ours[key], theirs[key])
    torch.testing.assert_close(ours["state_dict"], theirs["state_dict"], rtol=1e-4, atol=2e-5)
    states = [state["optimizer_states"][0]["state"] for state in (ours, theirs)]
    torch.testing.assert_close(*states, rtol=1e-3, atol=1e-5)


def same_format(left: Any, right: Any) -> bool:
    """Return whether two nested structures have the same keys, and tensors of the same shape and dtype."""
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return type(left) is type(right) and left.shape == right.shape and left.dtype == right.dtype
    if isinstance(left, dict) and isinstance(right, dict):
        return list(left) == list(right) and all(same_format(left[key], right[key]) for key in left)
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(same_format, left, right))
    return bool(left == right)


def relative(ours: list[float], theirs: list[float]) -> float:
    """Return the largest relative difference of two curves."""
    return max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))


def mean_losses(ranks: list[dict[str, Any]]) -> list[float]:
    """Return the mean over ranks per micro-batch: the global batch's, as ranks of one group agree."""
    return [sum(values) / len(values) for values in zip(*(rank["losses"] for rank in ranks), strict=True)]
