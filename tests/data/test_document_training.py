"""Training on documents: two processes have the loss of one."""

from itertools import islice

import pytest
import torch
from support.documents import lengths, loader
from support.ranks import on_ranks
from torch.nn import functional as F

from lathe.tasks.language_modelling import LanguageModellingTask


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
    """Return the losses of 8 steps of SGD, averaged over ranks as DDP does."""
    task, losses = tiny(), []
    optimizer = torch.optim.SGD(task.parameters(), lr=1.0)
    for x, y, count in islice(loader(rank, world), 8):
        batch = (x, y, count / world)  # as from the data module
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
