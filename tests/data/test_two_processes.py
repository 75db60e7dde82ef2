"""Two processes have the losses of one: datasets, iterable ones and documents, in one start.

Where each rank keeps its own loader on request, an IterableDataset gives both the same batches, and so the losses of
one process too.
"""

import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from data.test_dataset import HELD_OUT, module, run_of, stream_run
from data.test_documents import tiny
from data.test_foreign import plain
from support.documents import loader
from support.own_datasets import Flow
from support.ranks import on_ranks
from support.runs import column

from lathe.errors import UserError
from lathe.training.train import train

OWN_LOADERS = ("endless", "trainer.use_distributed_sampler=true", "trainer.limit_train_batches=5", "test=false")


class Divided(Flow):
    """Gives each process its own part, as datasets for torch's DDP do."""

    def __iter__(self) -> Iterator[Any]:
        return islice(super().__iter__(), int(os.environ["RANK"]), None, 2)


def document_losses(rank: int, world: int) -> list[float]:
    """Return the losses of 8 steps of SGD on documents, averaged over ranks as DDP does."""
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


def results_of(rank: int, cfgs: list[dict[str, Any]]) -> tuple[list[float], list[dict[str, Any]]]:
    divided = module(Divided(), 2, rank, samples=40, **HELD_OUT).train_dataloader()
    with pytest.raises(UserError, match=r"^data\.train: Divided gives each process other samples: let it give all"):
        next(iter(divided))
    return document_losses(rank, 2), [train(cfg) for cfg in cfgs]


@pytest.mark.filterwarnings("ignore:data. train_dataloader stays")
@pytest.mark.filterwarnings("ignore:trainer.use_distributed_sampler=true. each of the 2 ranks")
def test_two_processes_have_the_losses_of_one(tmp_path: Path) -> None:
    """An iterable dataset that divides itself is refused."""
    one, two = (
        [
            run_of(tmp_path / name / "rows", *words),
            stream_run(tmp_path / name / "stream", "Flow", *words),
            plain(tmp_path / name / "own", *OWN_LOADERS, *words),
        ]
        for name, words in (("one", []), ("two", ["trainer.devices=2"]))
    )
    ranks = on_ranks(results_of, two, timeout=240)
    alone = document_losses(0, 1)
    assert alone[0] > alone[-1]
    assert ranks[0][0] == ranks[1][0] == pytest.approx(alone, rel=1e-6)
    for cfg, together, found, steps in zip(one, two, ranks[0][1], (10, 12, 10), strict=True):
        result = train(cfg)
        losses = [column(Path(run["paths"]["run_dir"]), "train/loss") for run in (cfg, together)]
        assert len(losses[0]) == steps
        assert losses[1] == pytest.approx(losses[0], rel=1e-5)
        for name in ("val/loss", "val/accuracy", "test/loss", "test/accuracy") if "test/loss" in result else ():
            assert found[name] == pytest.approx(result[name], rel=1e-5)
