"""Callbacks on ranks that hold shards of a net, or other blocks each."""

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from support.quiet import Batches, quiet_trainer
from support.ranks import on_ranks
from torch import Tensor, nn

from lathe.callbacks import ModelSummary, NanGuard, Preemption, Throughput
from lathe.errors import UserError
from lathe.trainer import Trainer


class Task(LightningModule):
    """Shards by its strategy, counts tokens, and corrupts one number of rank 1's gradient in step `bad`."""

    unit = "tokens"

    def __init__(self, bad: int = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
        self.bad = bad

    def count_units(self, batch: Any) -> int:
        return int(batch[0].numel())

    def configure_model(self) -> None:
        self.trainer.strategy.shard(self)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0]).square().mean()

    def on_after_backward(self) -> None:
        if self.trainer.global_step == self.bad - 1 and self.global_rank == 1:
            self.net[2].weight.grad.to_local()[0, 3] = torch.nan

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.net.parameters(), lr=0.1)


def batches() -> Batches:
    return Batches([(torch.full((8, 4), 0.1 * (i + 1)), torch.zeros(8)) for i in range(6)])


def trainer_with(*callbacks: Any) -> Trainer:
    from lathe.strategies.fsdp import FSDP

    return quiet_trainer(*callbacks, devices=2, strategy=FSDP(min_params=1), max_epochs=1)


def a_bad_shard(rank: int) -> str:
    trainer = trainer_with(NanGuard(every_n_steps=1))
    with pytest.raises(UserError) as caught:
        trainer.fit(Task(bad=3), batches())
    return f"{trainer.global_step} {caught.value}"


def test_a_gradient_that_is_bad_in_one_shard_is_named_on_all_ranks() -> None:
    one, other = on_ranks(a_bad_shard)
    assert one == other
    assert one.startswith(
        "2 Training stopped: in optimizer step 3 the gradient of 2.weight is nan although the loss is finite"
    )


class Parts(LightningModule):
    """As under a pipeline: each rank trains its own block, and all ranks receive the last one's loss."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.net[1 - rank] = nn.Identity()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = self.net(batch[0]).square().mean()
        return loss * torch.nan if batch_idx == 1 else loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.net.parameters(), lr=0.1)


def other_blocks_each(rank: int) -> str:
    trainer = quiet_trainer(NanGuard(every_n_steps=1), devices=2, strategy="ddp", max_epochs=1)
    with pytest.raises(UserError) as caught:
        trainer.fit(Parts(rank), batches())
    return str(caught.value)


def test_ranks_with_other_parameters_stop_together_without_a_second_pass() -> None:
    one, other = on_ranks(other_blocks_each)
    assert one == other
    assert "in optimizer step 2 the loss is nan on process 0, and each process has a part of the net only;" in one


def metrics(rank: int) -> Any:
    throughput, summary, preemption = (
        Throughput(skip_steps=1, peak_flops=1e9),
        ModelSummary(),
        Preemption(every_n_steps=1),
    )
    trainer = trainer_with(throughput, summary, preemption)
    task = Task()
    strategy: Any = trainer.strategy
    if rank == 0:
        summary.summarize = lambda data, total, trainable, *rest, **more: setattr(task, "counted", (total, trainable))
    trainer.fit(task, batches())
    replicas = throughput.summary()
    type(strategy).distributed_sampler_kwargs = {"num_replicas": 1, "rank": 0}  # as if both ranks held one replica
    again = Throughput(skip_steps=1, peak_flops=1e9)
    trainer_with(again).fit(Task(), batches())
    return replicas, again.summary(), getattr(task, "counted", None), [throughput._windows, again._windows]


def test_rates_count_replicas_and_mfu_counts_devices() -> None:
    (two, one, counted, windows), _ = on_ranks(metrics)
    assert counted == (4 * 6 + 6 + 6 * 2 + 2,) * 2  # all, though rank 0 holds half
    assert "samples_per_s" not in two
    per_token = 3 * 2 * (4 * 6 + 6 * 2) / 4  # three passes; a multiply-add is two; a sample is four tokens
    for found, replicas, share, seen in ((two, 2, 1, windows[0]), (one, 1, 2, windows[1])):
        ((batches, tokens, seconds, _, _),) = seen
        assert (batches, tokens) == (5, 5 * 8 * 4)
        assert found["tokens_per_s"] == pytest.approx(replicas * tokens / seconds)
        assert found["mfu"] == pytest.approx(per_token * tokens / seconds / (1e9 * share))
