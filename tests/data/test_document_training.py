"""Training on documents: the loss of one process on two, known lengths of runs, exact resume."""

from itertools import islice
from pathlib import Path

import pytest
import torch
from lightning.pytorch import LightningModule
from support.documents import lengths, loader, module
from support.ranks import on_ranks
from torch.nn import functional as F

from lathe.callbacks.rng_state import ExactResume
from lathe.tasks.language_modelling import LanguageModellingTask
from lathe.trainer import Trainer


def tiny() -> LanguageModellingTask:
    torch.manual_seed(0)
    return LanguageModellingTask(
        torch.nn.Sequential(
            torch.nn.Embedding(1 + sum(lengths()), 4),
            torch.nn.Linear(4, 8),
            torch.nn.Tanh(),
            torch.nn.Linear(8, 1 + sum(lengths())),
        )
    )


def train(rank: int, world: int) -> list[float]:
    """Losses of 8 steps of SGD, averaged over ranks as DDP does."""
    task, losses = tiny(), []
    optimizer = torch.optim.SGD(task.parameters(), lr=1.0)
    for x, y, count in islice(loader(rank, world), 8):
        batch = (x, y, count / world)  # as the data module hands it over
        optimizer.zero_grad()
        loss = torch.stack(list(task.losses(task.net(batch[0]), batch).values())).sum()
        loss.backward()
        total = loss.detach().clone()
        if world > 1:
            for value in (total, *(p.grad for p in task.parameters())):
                torch.distributed.all_reduce(value)
                value /= world
        optimizer.step()
        losses.append(total.item())
    return losses


def rank_losses(rank: int) -> list[float]:
    return train(rank, 2)


def test_two_ranks_have_the_losses_of_one() -> None:
    one = train(0, 1)
    pair = on_ranks(rank_losses)
    assert one[0] > one[-1]
    assert pair[0] == pair[1]
    assert pair[0] == pytest.approx(one, rel=1e-6)


def test_the_loss_is_the_mean_over_the_global_batchs_targets() -> None:
    task, (x, y, count) = tiny(), next(iter(loader()))
    ours = task.losses(task.net(x), (x, y, count))["cross_entropy"]
    torch.testing.assert_close(ours, F.cross_entropy(task.net(x).flatten(0, 1), y.flatten()))


class Recorder(LightningModule):
    """Notes what each step saw."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen: list[list[int]] = []

    def training_step(self, batch: tuple[torch.Tensor, ...], index: int) -> torch.Tensor:
        self.seen.append(batch[1].flatten().tolist())
        return self.layer(batch[2].view(1, 1)).sum() * 0

    def on_train_batch_end(self, *_: object) -> None:
        if self.trainer.global_step == 7:
            self.trainer.save_checkpoint(f"{self.trainer.default_root_dir}/7.ckpt")

    def validation_step(self, batch: tuple[torch.Tensor, ...], index: int) -> None:
        pass

    def configure_optimizers(self) -> torch.optim.Optimizer:
        self.planned = self.trainer.estimated_stepping_batches
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_a_fit_counts_its_steps_beforehand_and_resumes_exactly(tmp_path: Path) -> None:
    quiet = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "default_root_dir": tmp_path,
        "accelerator": "cpu",
        "max_epochs": 2,
        "num_sanity_val_steps": 0,
        "limit_val_batches": 0,
    }
    whole, rest = Recorder(), Recorder()
    Trainer(**quiet, callbacks=[ExactResume(0)]).fit(whole, datamodule=module())
    assert len(whole.seen) == whole.planned
    Trainer(**quiet, callbacks=[ExactResume(0)]).fit(
        rest, datamodule=module(), ckpt_path=tmp_path / "7.ckpt", weights_only=True
    )
    assert rest.seen == whole.seen[7:]
