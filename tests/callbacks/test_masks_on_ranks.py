"""Lottery tickets and RigL on two ranks: equal masks, and equal weights after an interruption."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from support.quiet import quiet_trainer
from support.ranks import on_ranks
from torch import Tensor, nn

from lathe.callbacks import ExactResume
from lathe.compression.pruning.callback import Lottery, RigL
from lathe.optim.schedules import cosine

pytestmark = [pytest.mark.law3, pytest.mark.slow]


class Fixed(LightningModule):
    """Each rank has its own batches, which give BatchNorm statistics."""

    schedule_repeats = 1

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(3, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8), nn.Linear(8, 2))

    def configure_model(self) -> None:
        shard = getattr(self.trainer.strategy, "shard", None)
        if shard is not None:
            shard(self)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        draw = torch.Generator().manual_seed(100 * self.global_rank + int(batch))
        out: Tensor = self.net(torch.randn(8, 3, generator=draw))
        return (out - torch.arange(2)).square().mean()

    def train_dataloader(self) -> Any:
        return Numbers()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)
        total = int(self.trainer.estimated_stepping_batches) // self.schedule_repeats
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": cosine(optimizer, total), "interval": "step"}}


class Numbers:
    """Numbers from 0 to 5 with a stateful position."""

    done = begin = 0

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Iterator[int]:
        begin, self.begin = self.begin, 0
        for i in range(begin, 6):
            self.done = i + 1
            yield i

    def state_dict(self) -> dict[str, int]:
        return {"done": self.done % 6}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.begin = state["done"]


METHODS = {
    "lottery": (lambda: Lottery(sparsity=0.75, rounds=3, rewind=2), 8),
    "rigl": (lambda: RigL(sparsity=0.7, every_n_steps=3, fraction=0.5), 7),
}


class Saves(Callback):
    def __init__(self, path: Path, step: int) -> None:
        self.path, self.step = path, step

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


def on_two(rank: int, folder: str) -> dict[str, Any]:
    """Return by method and strategy the weights and masks of a whole run, and of a resumed one."""
    from lathe.strategies import DDP
    from lathe.strategies.fsdp import FSDP

    found: dict[str, Any] = {}
    for name, (make, step) in METHODS.items():
        for strategy in ("ddp", "fsdp"):
            for resumes in (False, True):
                path, method, task = Path(folder) / f"{name} {strategy}.ckpt", make(), Fixed()
                spread = DDP() if strategy == "ddp" else FSDP(min_params=1, checkpoint="full")
                more = [] if resumes else [Saves(path, step)]
                trainer = quiet_trainer(ExactResume(0), method, *more, devices=2, strategy=spread, max_epochs=2)
                trainer.fit(task, ckpt_path=path if resumes else None, weights_only=True)
                state = task.net.state_dict()
                state = {
                    key: value.full_tensor() if hasattr(value, "full_tensor") else value for key, value in state.items()
                }
                found[f"{name} {strategy}{' continued' if resumes else ''}"] = {"state": state, "masks": method.masks}
    return found


def test_ranks_agree_and_an_interruption_changes_nothing(tmp_path: Path) -> None:
    first, second = on_ranks(on_two, str(tmp_path))
    for name, mine in first.items():
        assert mine["masks"]
        for key, mask in mine["masks"].items():
            assert torch.equal(mask, second[name]["masks"][key])
            assert bool((mine["state"][key][~mask] == 0).all())
        for key, value in mine["state"].items():
            if "running" not in key:  # each rank's own
                assert torch.equal(value, second[name]["state"][key]), (name, key)
    for name in METHODS:
        ddp, fsdp = first[f"{name} ddp"], first[f"{name} fsdp"]
        for key, mask in ddp["masks"].items():
            assert torch.equal(mask, fsdp["masks"][key])
            torch.testing.assert_close(ddp["state"][key], fsdp["state"][key], rtol=1e-4, atol=1e-5)
        for strategy in ("ddp", "fsdp"):
            for rank in (first, second):
                for key, value in rank[f"{name} {strategy}"]["state"].items():
                    if rank is first or "running" not in key:  # a checkpoint holds those of rank 0
                        assert torch.equal(value, rank[f"{name} {strategy} continued"]["state"][key]), (
                            name,
                            strategy,
                            key,
                        )
